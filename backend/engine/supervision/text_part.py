"""The server's part of a loaded model: its text side, and access to the media side."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.config import ModelOptions
from backend.engine.messages.protocol import Loaded
from backend.engine.supervision.media import Prepare, RemoteMedia
from backend.model.loaded import LoadedModel
from common.memory.garbage import LASTING
from common.process.own_thread import in_own_thread


def read_text_part(options: ModelOptions, directory: Path) -> Any:  # noqa: ANN401 (untyped upstream)
    """Read a checkpoint's tokenizer while a process loads its weights; takes seconds.

    Raises:
        LoadError: One of its files is malformed.
    """
    from backend.model.text.hf_tokenizer import read_tokenizer
    from backend.model.text.isolated.template import PROCESSES

    # 90,000 objects of libraries, which no collection has to look at.
    LASTING.leave_out_at_once()
    PROCESSES.prepare()
    return read_tokenizer(options, directory)


async def loaded_model(
    options: ModelOptions,
    loaded: Loaded,
    text: Any,  # noqa: ANN401 (untyped upstream)
    prepare: Prepare,
) -> LoadedModel:
    """Return the server's view of a model loaded by a process.

    Args:
        options: Of the load.
        loaded: The facts reported by the process.
        text: The result of `read_text_part`.
        prepare: Has the process prepare a medium.
    """
    from backend.model.text.hf_tokenizer import with_template

    defaults = loaded.tokenizer_defaults
    tokenizer, template, _ = await in_own_thread(with_template, options, text, defaults)
    media = None
    if loaded.media is not None:
        media = RemoteMedia(loaded.media, prepare, asyncio.get_running_loop())
    card = replace(
        loaded.card,
        supports_tools=template.supports_tools,
        supports_thinking=template.supports_thinking,
    )
    return LoadedModel(tokenizer, template, card, media=media)
