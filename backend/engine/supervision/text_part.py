"""The server's part of a loaded model: its text side, and access to the media side."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from backend.config import PREPARED_MEDIA_BYTES, ModelOptions
from backend.core.prompt import MediaKind, PreparedMedium
from backend.engine.messages.protocol import Loaded, MediaFacts, PrepareMedium
from backend.errors import RefusedMediumError
from backend.model.checkpoint.gate import tokenizer_directory, tokenizer_named
from backend.model.loaded import LoadedModel
from backend.model.text.pattern_trial import direct_chars
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_processor import Content, ProcessorError, raw
from common.helper import POLL_S
from common.last_used import LastUsed
from common.machine_memory import LASTING
from common.process import in_own_thread
from common.rpc import require_caller

Prepare: TypeAlias = Callable[[PrepareMedium], Awaitable[PreparedMedium]]
"""Has a medium prepared by the process with the model."""


class RemoteMedia:
    """Has media prepared in the engine process, and caches some; safe from any thread.

    Attributes:
        snippets: The text for a medium, by kind that the model supports.
        takes_parts: Whether the template writes them; otherwise they are put into its messages.
        sampling_rate: Of its audio input, in Hz.
    """

    def __init__(
        self, facts: MediaFacts, prepare: Prepare, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.snippets = facts.snippets
        self.takes_parts = facts.takes_parts
        self.sampling_rate = facts.sampling_rate
        self._prepare = prepare
        self._loop = loop
        self._known: LastUsed[bytes, PreparedMedium] = LastUsed(
            math.inf, PREPARED_MEDIA_BYTES, lambda _, medium: medium.nbytes
        )

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays; not to be called on the event loop.

        Args:
            digest: Identifies it: a cached medium is not prepared again.

        Raises:
            ProcessorError: The processor refuses it.
            BackendError: The engine could not do it.
        """
        if (known := self._known.find(digest)) is not None:
            return known
        array, fps = raw(kind, content)
        request = PrepareMedium(kind=kind, content=array, fps=fps, digest=digest)
        try:
            medium = self._result(asyncio.run_coroutine_threadsafe(self._call(request), self._loop))
        except RefusedMediumError as error:
            raise ProcessorError(str(error)) from error
        return self._known.keep(digest, medium)

    @staticmethod
    def _result(preparation: Future[PreparedMedium]) -> PreparedMedium:
        """Wait for a preparation, which ends when its caller leaves."""
        try:
            while not wait((preparation,), POLL_S).done:
                require_caller()
        except BaseException:
            preparation.cancel()
            raise
        return preparation.result()

    async def _call(self, request: PrepareMedium) -> PreparedMedium:
        return await self._prepare(request)


@dataclass(frozen=True, slots=True)
class TextPart:
    """The tokenizers of a checkpoint, known before its process has read the weights."""

    hf_tokenizer: Any
    tokenizer: Tokenizer


def read_text_part(options: ModelOptions, directory: Path) -> TextPart:
    """Read a checkpoint's tokenizer while a process loads its weights; takes seconds.

    Raises:
        LoadError: One of its files is malformed, or a pattern takes too long.
    """
    from backend.model.text.hf_tokenizer import (
        read_tokenizer,
        require_own_template,
        with_special_tokens,
    )
    from backend.model.text.isolated.template_pool import PROCESSES

    # 90,000 objects of libraries, which no collection has to look at.
    LASTING.leave_out_at_once()
    PROCESSES.prepare()
    # Before the tokenizer reads anything.
    with tokenizer_named(options):
        source = tokenizer_directory(options, directory)
        chars = direct_chars(source)
    hf_tokenizer = read_tokenizer(options, directory)
    require_own_template(options, hf_tokenizer, source)
    tokenizer = with_special_tokens(options, hf_tokenizer)
    tokenizer.read_elsewhere_beyond(chars)
    # Before the first token needs it.
    _ = tokenizer.longest_piece_bytes
    return TextPart(hf_tokenizer, tokenizer)


async def loaded_model(
    options: ModelOptions, loaded: Loaded, text: TextPart, prepare: Prepare
) -> LoadedModel:
    """Return the server's view of a model loaded by a process."""
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
