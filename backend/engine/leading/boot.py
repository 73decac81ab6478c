"""Rank 0, the engine process: it loads the model that the server names, and runs its loop.

The main thread computes. One thread listens to the server, one to each other rank; the intake has
grammars made and media prepared. An unrecoverable error ends the process, and with it the group:
the server starts another.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from backend.config import ModelOptions
from backend.core.model import ModelKind
from backend.core.prompt import PreparedMedium
from backend.engine.assembly import assemble_any_loop, look_whole, read_whole
from backend.engine.encoder_loop import EncoderLoop
from backend.engine.findings import Notebook
from backend.engine.grammars.pool import GrammarPool, GrammarWorkshop, Outcome
from backend.engine.leading.server_port import MachineShare, ServerPort
from backend.engine.loop import EngineLoop
from backend.engine.messages.codec import Channel, ChannelClosedError
from backend.engine.messages.protocol import (
    Answered,
    Cancel,
    Compiling,
    Failed,
    Failure,
    Found,
    Job,
    Leave,
    Load,
    Loadable,
    Loaded,
    MediaFacts,
    PrepareMedium,
    Read,
    Submit,
    Told,
    Waiting,
)
from backend.engine.port import Command
from backend.errors import (
    BackendError,
    GenerationFailedError,
    GroupLostError,
    InvalidRequestError,
    RefusedMediumError,
)
from backend.model.loaded import RunnableModel
from backend.model.loader import tokenizer_defaults
from backend.model.vision.media_processor import MediaPreparer, ProcessorError, content_of
from common.machine_memory import LASTING
from common.process import exit_at_once

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Intake:
    """Listens to the server, on separate threads."""

    _server: Channel
    _media: MediaPreparer | None
    _grammars: GrammarPool
    _commands: "queue.SimpleQueue[Command]"
    _fail: Callable[[BaseException], NoReturn]
    _jobs: "queue.SimpleQueue[tuple[int, PrepareMedium]]" = field(default_factory=queue.SimpleQueue)
    _wanted: set[int] = field(default_factory=set)

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
                self._grammars.submit(request.request_id, request.guide, admit, request.caller)
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
            self._server.send(Told(failures={order.request.request_id: Failure.of(made)}))
            return
        request = replace(order.request, guide=None, grammar=made)
        self._commands.put(structs.replace(order, request=request))

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
        except BackendError as error:
            self._server.send(Answered(number, Failure.of(error)))
        except Exception as error:
            problem = "the medium could not be prepared"
            log.exception("%s", problem)
            failure = Failure.of(GenerationFailedError(f"{problem}: {error}"))
            self._server.send(Answered(number, failure))

    def _prepared(self, request: PrepareMedium) -> PreparedMedium:
        if self._media is None:
            raise InvalidRequestError("Images", "the loaded model reads text only")
        content = content_of(request.kind, request.content, request.fps)
        return self._media.prepare(request.kind, content, request.digest)


# Another rank that fails is reported by the thread that listens to it, if given this time.
_NEWS_DELAY_S = 2.0


class Boot:
    """Loads one model into this process, and serves it until the process ends."""

    def __init__(self, server: Channel, state: Path | None = None) -> None:
        """Prepare; `state` is the directory of this user's files, `None` that in the home."""
        self._server = server
        self._state = state
        self._share = MachineShare()
        self._port = ServerPort(server, self._share)

    def run(self) -> NoReturn:
        """Load a model and compute until told to stop; never returns."""
        self._server.watch(lambda: os._exit(0))
        try:
            self._server.send(Waiting())
            order = self._server.receive()
            if isinstance(order, Load):
                loop = self._load(order)
                loop.run()
                self._share.leave()
        except ChannelClosedError:
            pass
        except BackendError as error:
            self._fail(error)
        except BaseException as error:  # the top of the process: models raise even SystemExit
            log.critical("the engine has failed", exc_info=error)
            if self._port.is_shared:
                # If a rank is gone, its thread reports it and ends this process first.
                time.sleep(_NEWS_DELAY_S)
                self._fail(GroupLostError(f"rank 0 failed: {error}"))
            self._fail(error)
        exit_at_once(0)

    def _load(self, load: Load) -> EngineLoop | EncoderLoop:
        """Load a model, and start listening to the server."""
        load = structs.replace(load, options=replace(load.options, state_dir=self._state))
        model, loop = self._load_group(load) or self._load_alone(load)
        self._serve(model, loop)
        return loop

    def _wait_to_read(self, load: Load) -> ModelOptions:
        """Wait until the model before is gone, and return the options after joining the ledger."""
        self._server.send(Loadable())
        if not isinstance(self._server.receive(), Read):
            exit_at_once(0)
        return self._share.join(load).options

    def _load_alone(self, load: Load) -> tuple[RunnableModel, EngineLoop | EncoderLoop]:
        model = look_whole(load.options, load.directory)
        options, make_room = self._wait_to_read(load), self._share.make_room
        notebook = Notebook(load.known, lambda *found: self._server.send(Found(*found)))
        model = read_whole(model, options, make_room)
        loop = assemble_any_loop(model, options, self._port, notebook, make_room)
        has_media = model.media is not None
        self._share.begin(loop.status(), self._port.post, has_media=has_media)
        return model, loop

    def _load_group(self, load: Load) -> tuple[RunnableModel, EngineLoop] | None:
        """Load a model into several processes, of which this is the first, if options name them."""
        tuning = load.options.tuning
        if not tuning.group.is_named:
            return None
        from backend.engine.distributed.gathering import Form
        from backend.engine.distributed.members import checked
        from backend.engine.distributed.topology import topology_of
        from backend.engine.leading.group_port import join_group

        if (topology := topology_of(tuning)) is None:
            return None
        form = checked(
            Form(
                topology=topology,
                options=load.options,
                directory=load.directory,
                timeout_s=tuning.group.worker_timeout_s,
            )
        )
        share = self._wait_to_read(load).memory_utilization
        form = structs.replace(form, options=replace(form.options, memory_utilization=share))
        model, loop, self._port = join_group(form, self._server, self._share, self._fail)
        return model, loop

    def _serve(self, model: RunnableModel, loop: EngineLoop | EncoderLoop) -> None:
        """Tell the server that the model is loaded, and start listening to it."""
        grammars = GrammarPool(
            GrammarWorkshop(model.tokenizer, model.card),
            lambda names: self._server.send(Compiling(names)),
        )
        status = self._port.status(loop)
        card = loop.model.card
        if self._port.is_shared:
            card = replace(card, weights_bytes=status.memory_bytes["weights"])
        self._server.send(
            Loaded(
                card=card,
                status=status,
                tokenizer_defaults=tokenizer_defaults(model.network),
                media=_media_facts(model),
            )
        )
        Intake(self._server, model.media, grammars, self._port.commands, self._fail).start()
        if model.card.kind is ModelKind.DECODER:
            grammars.start()
        # Without a collection, which would delay the first token.
        LASTING.leave_out_at_once()

    def _fail(self, error: BaseException) -> NoReturn:
        """Report the error to the server, and end this process with its children."""
        with contextlib.suppress(ChannelClosedError):
            self._server.send(Failed(Failure.of(error)))
        exit_at_once(1)


def _media_facts(model: RunnableModel) -> MediaFacts | None:
    media = model.media
    if media is None:
        return None
    return MediaFacts(
        snippets=media.snippets, takes_parts=media.takes_parts, sampling_rate=media.sampling_rate
    )
