"""The server's access to the model's media processor, which needs MLX."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from backend.config import PREPARED_MEDIA_BYTES
from backend.core.media import MediaKind
from backend.engine.messages.protocol import MediaFacts, PreparedInputs, PrepareMedium
from backend.errors import RefusedMediumError
from backend.model.vision.media_processor import (
    Content,
    PreparedMedium,
    ProcessorError,
    raw,
)

Prepare: TypeAlias = Callable[[PrepareMedium], Awaitable[PreparedInputs]]
"""Has a medium prepared by the process with the model."""


class RemoteMedia:
    """Has media prepared in the engine process, and caches some; safe from any thread.

    Attributes:
        snippets: The text for a medium, by kind that the model supports.
        takes_parts: Whether the template writes them; otherwise they are put into its messages.
        sampling_rate: Of its audio input, in Hz.
    """

    def __init__(
        self,
        facts: MediaFacts,
        prepare: Prepare,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start with an empty cache.

        Args:
            facts: About the processor.
            prepare: Reaches it; on the event loop.
            loop: The event loop.
        """
        self.snippets = facts.snippets
        self.takes_parts = facts.takes_parts
        self.sampling_rate = facts.sampling_rate
        self._prepare = prepare
        self._loop = loop
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, PreparedMedium] = OrderedDict()
        self._known_bytes = 0

    def prepare(self, kind: MediaKind, content: Content, digest: bytes) -> PreparedMedium:
        """Return a medium's text, tokens and arrays; not to be called on the event loop.

        Args:
            kind: One that has a snippet.
            content: The medium.
            digest: Identifies it: a cached medium is not prepared again.

        Raises:
            ProcessorError: The processor refuses it.
            BackendError: The engine could not do it.
        """
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        array, fps = raw(kind, content)
        request = PrepareMedium(kind=kind, content=array, fps=fps, digest=digest)
        try:
            inputs = asyncio.run_coroutine_threadsafe(self._call(request), self._loop).result()
        except RefusedMediumError as error:
            raise ProcessorError(str(error)) from error
        parts = (inputs.text, inputs.token_ids, inputs.inputs, inputs.marks)
        medium = PreparedMedium(kind, digest, *parts, inputs.lead, inputs.rules)
        self._remember(medium)
        return medium

    async def _call(self, request: PrepareMedium) -> PreparedInputs:
        return await self._prepare(request)

    def _remember(self, medium: PreparedMedium) -> None:
        with self._lock:
            if medium.digest in self._known:
                return
            self._known[medium.digest] = medium
            self._known_bytes += medium.nbytes
            while self._known_bytes > PREPARED_MEDIA_BYTES and len(self._known) > 1:
                self._known_bytes -= self._known.popitem(last=False)[1].nbytes
