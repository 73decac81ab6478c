"""Receives the server's orders for turns, compiles grammars and prepares media."""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeAlias

from backend.engine.distributed.grammars import SentGrammar
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.commands import Cancel, DiskNews, Resize, Submit
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import (
    Answered,
    Job,
    Leave,
    PreparedInputs,
    PrepareMedium,
    Stop,
)
from backend.engine.messages.stream import Publication
from backend.errors import (
    BackendError,
    GenerationFailedError,
    InvalidRequestError,
    RefusedMediumError,
)
from backend.model.vision.media_processor import MediaPreparer, ProcessorError, content_of
from common.process.lifecycle import exit_at_once

# A load is often followed by a request, whose first token should not wait for the GIL.
_WARM_UP_DELAY_S = 2.0

log = logging.getLogger(__name__)

Command: TypeAlias = Submit | Cancel | Job | Leave | Stop | DiskNews | Resize | Publication
"""Obeyed by the computing thread, in order of arrival."""


def _do_nothing() -> None:
    """Prepare nothing."""


class Intake:
    """Listens to the server, on separate threads."""

    def __init__(
        self,
        server: Channel,
        media: MediaPreparer | None,
        commands: "queue.SimpleQueue[Command]",
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Create an intake; see `start`.

        Args:
            server: Sends orders.
            media: Prepares media; `None` for a text model.
            commands: Receives orders that concern a turn.
            fail: Ends the process.
        """
        self._server = server
        self._media = media
        self._commands = commands
        self._fail = fail
        self._guided: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._waiting: set[str] = set()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[int, PrepareMedium]] = queue.SimpleQueue()
        self._wanted: set[int] = set()

    def start(self, warm_up: Callable[[], None] = _do_nothing) -> None:
        """Start the threads.

        Args:
            warm_up: Prepares for grammars; called once no first token waits for this process.
        """
        for work in (self._listen, partial(self._compile, warm_up), self._prepare):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ChannelClosedError:
            exit_at_once(0)
        except Exception as error:  # noqa: BLE001 (the top of a thread)
            self._fail(error)

    def _listen(self) -> None:
        while True:
            self._route(self._server.receive())

    def _route(self, order: Command) -> None:
        match order:
            case Submit(request) if isinstance(request.grammar, SentGrammar):
                self._await_grammar(order)
            case Cancel(request_id):
                with self._lock:
                    self._waiting.discard(request_id)
                self._commands.put(order)
            case Job(number, PrepareMedium() as request):
                self._wanted.add(number)
                self._jobs.put((number, request))
            case Leave(number):
                self._wanted.discard(number)
                self._commands.put(order)
            case _:
                self._commands.put(order)

    def _await_grammar(self, order: Submit) -> None:
        with self._lock:
            self._waiting.add(order.request.request_id)
        self._guided.put(order)

    def _compile(self, warm_up: Callable[[], None]) -> None:
        try:
            self._compile_one(self._guided.get(timeout=_WARM_UP_DELAY_S))
        except queue.Empty:
            warm_up()
        while True:
            self._compile_one(self._guided.get())

    def _compile_one(self, order: Submit) -> None:
        command: Command = order
        try:
            if isinstance(order.request.grammar, SentGrammar):
                order.request.grammar.compile()
        except Exception as error:  # noqa: BLE001 (any error of one request's grammar)
            failure = _failure("its grammar could not be compiled", error)
            command = Publication(order.request.request_id, failure)
        with self._lock:
            if order.request.request_id in self._waiting:
                self._waiting.discard(order.request.request_id)
                self._commands.put(command)

    def _prepare(self) -> None:
        while True:
            number, request = self._jobs.get()
            if number in self._wanted:
                self._answer(number, request)
            self._wanted.discard(number)

    def _answer(self, number: int, request: PrepareMedium) -> None:
        try:
            self._server.send(Answered(number, self._prepared(request)))
        except ChannelClosedError:
            raise
        except ProcessorError as error:
            self._server.send(Answered(number, Failure.of(RefusedMediumError(str(error)))))
        except Exception as error:  # noqa: BLE001 (any error of one medium)
            failure = _failure("the medium could not be prepared", error)
            self._server.send(Answered(number, failure))

    def _prepared(self, request: PrepareMedium) -> PreparedInputs:
        if self._media is None:
            raise InvalidRequestError("Images", "the loaded model reads text only")
        content = content_of(request.kind, request.content, request.fps)
        medium = self._media.prepare(request.kind, content, request.digest)
        return PreparedInputs(
            text=medium.text,
            token_ids=medium.token_ids,
            inputs=medium.inputs,
            marks=medium.marks,
            lead=medium.lead,
            rules=tuple(medium.rules),
        )


def _failure(problem: str, error: Exception) -> Failure:
    """Return an error of one request as a message; unexpected ones are logged."""
    if isinstance(error, BackendError):
        return Failure.of(error)
    log.error("%s", problem, exc_info=error)
    return Failure.of(GenerationFailedError(f"{problem}: {error}"))
