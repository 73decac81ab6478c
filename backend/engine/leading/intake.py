"""Receives the server's orders for turns, has grammars made and prepares media."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

from backend.engine.grammars.pool import GrammarPool, Outcome
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.commands import Cancel, Submit
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import (
    Answered,
    Job,
    Leave,
    PreparedInputs,
    PrepareMedium,
    Told,
)
from backend.engine.port import Command
from backend.errors import (
    BackendError,
    GenerationFailedError,
    InvalidRequestError,
    RefusedMediumError,
)
from backend.model.vision.media_processor import MediaPreparer, ProcessorError, content_of
from common.process.lifecycle import exit_at_once

log = logging.getLogger(__name__)


class Intake:
    """Listens to the server, on separate threads."""

    def __init__(
        self,
        server: Channel,
        media: MediaPreparer | None,
        grammars: GrammarPool,
        commands: "queue.SimpleQueue[Command]",
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Create an intake; see `start`.

        Args:
            server: Sends orders.
            media: Prepares media; `None` for a text model.
            grammars: Makes grammars.
            commands: Receives orders that concern a turn.
            fail: Ends the process.
        """
        self._server = server
        self._media = media
        self._grammars = grammars
        self._commands = commands
        self._fail = fail
        self._jobs: queue.SimpleQueue[tuple[int, PrepareMedium]] = queue.SimpleQueue()
        self._wanted: set[int] = set()

    def start(self) -> None:
        """Start the threads."""
        for work in (self._listen, self._prepare):
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
            case Submit(request) if request.guide is not None:
                admit = partial(self._admit, order)
                self._grammars.submit(request.request_id, request.guide, admit)
            case Cancel(request_id):
                self._grammars.cancel(request_id)
                self._commands.put(order)
            case Job(number, PrepareMedium() as request):
                self._wanted.add(number)
                self._jobs.put((number, request))
            case Leave(number):
                self._wanted.discard(number)
                self._commands.put(order)
            case _:
                self._commands.put(order)

    def _admit(self, order: Submit, made: Outcome) -> None:
        """Pass a request on with its grammar, or end it with the error."""
        if isinstance(made, BackendError):
            self._commands.put(Told(failures={order.request.request_id: Failure.of(made)}))
            return
        request = replace(order.request, guide=None, grammar=made)
        self._commands.put(Submit(request, order.generated))

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
