"""The server's part of a loaded model: its text side, and access to the media side."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.config import ModelOptions
from backend.engine.messages.protocol import Loaded
from backend.engine.supervision.media import Prepare, RemoteMedia
from backend.model.loaded import LoadedModel
from backend.model.text.pattern_trial import direct_chars
from backend.model.text.tokenizer import Tokenizer
from common.memory.garbage import LASTING
from common.process.own_thread import in_own_thread


@dataclass(frozen=True, slots=True)
class TextPart:
    """What is known of a checkpoint's text before its process has read the weights.

    Attributes:
        hf_tokenizer: As transformers reads it.
        tokenizer: With its tables.
    """

    hf_tokenizer: Any
    tokenizer: Tokenizer


def read_text_part(options: ModelOptions, directory: Path) -> TextPart:
    """Read a checkpoint's tokenizer while a process loads its weights; takes seconds.

    Raises:
        LoadError: One of its files is malformed, or a pattern takes too long.
    """
    from backend.model.text.hf_tokenizer import named, read_tokenizer, tokenizer_directory
    from backend.model.text.isolated.template import PROCESSES

    # 90,000 objects of libraries, which no collection has to look at.
    LASTING.leave_out_at_once()
    PROCESSES.prepare()
    # Before the tokenizer reads anything.
    chars = direct_chars(tokenizer_directory(options, directory))
    hf_tokenizer = read_tokenizer(options, directory)
    tokenizer = named(options, hf_tokenizer)
    tokenizer.read_elsewhere_beyond(chars)
    # Before the first token needs it.
    _ = tokenizer.longest_piece_bytes
    return TextPart(hf_tokenizer, tokenizer)


async def loaded_model(
    options: ModelOptions, loaded: Loaded, text: TextPart, prepare: Prepare
) -> LoadedModel:
    """Return the server's view of a model loaded by a process.

    Args:
        options: Of the load.
        loaded: The facts reported by the process.
        text: The result of `read_text_part`.
        prepare: Has the process prepare a medium.
    """
    from backend.model.text.hf_tokenizer import chat_template

    defaults = loaded.tokenizer_defaults
    template = await in_own_thread(chat_template, options, text.hf_tokenizer, defaults)
    media = None
    if loaded.media is not None:
        media = RemoteMedia(loaded.media, prepare, asyncio.get_running_loop())
    card = replace(
        loaded.card,
        supports_tools=template.supports_tools,
        supports_thinking=template.supports_thinking,
    )
    return LoadedModel(text.tokenizer, template, card, media=media)
