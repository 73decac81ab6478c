"""Rank 0, the engine process: it loads the model that the server names, and runs its loop.

The main thread computes. One thread listens to the server, one to each other rank; see `intake`
for the rest. An unrecoverable error ends the process, and with it the group: the server starts
another.
"""

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import NoReturn

from backend.engine.assembly import assemble_any_loop, load_whole
from backend.engine.encoder_loop import EncoderLoop
from backend.engine.findings import Notebook
from backend.engine.grammars.pool import GrammarPool
from backend.engine.grammars.workshop import GrammarWorkshop
from backend.engine.leading.intake import Intake
from backend.engine.leading.machine_share import MachineShare
from backend.engine.leading.server_port import ServerPort
from backend.engine.loop import EngineLoop
from backend.engine.messages.channel import Channel, ChannelClosedError
from backend.engine.messages.failure import Failure
from backend.engine.messages.protocol import Compiling, Failed, Found, Load, Loaded, MediaFacts
from backend.errors import BackendError, GroupLostError
from backend.model.loaded import RunnableModel
from backend.model.loader import tokenizer_defaults
from common.memory.garbage import LASTING
from common.process.lifecycle import exit_at_once

# Another rank that fails is reported by the thread that listens to it, if given this time.
_NEWS_DELAY_S = 2.0

log = logging.getLogger(__name__)


class Boot:
    """Loads one model into this process, and serves it until the process ends."""

    def __init__(self, server: Channel) -> None:
        """Create it; see `run`.

        Args:
            server: Sends orders and receives events.
        """
        self._server = server
        self._share = MachineShare()
        self._port = ServerPort(server, self._share)

    def run(self) -> NoReturn:
        """Load a model and compute until told to stop; never returns."""
        self._server.watch(lambda: os._exit(0))
        try:
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
        load = self._share.join(load)
        model, loop = self._load_group(load) or self._load_alone(load)
        self._serve(model, loop)
        return loop

    def _load_alone(self, load: Load) -> tuple[RunnableModel, EngineLoop | EncoderLoop]:
        options, make_room = load.options, self._share.make_room
        notebook = Notebook(load.known, lambda *found: self._server.send(Found(*found)))
        model = load_whole(options, load.directory, make_room)
        loop = assemble_any_loop(model, options, self._port, notebook, make_room)
        has_media = model.media is not None
        self._share.begin(loop.status(), self._port.post, has_media=has_media)
        return model, loop

    def _load_group(self, load: Load) -> tuple[RunnableModel, EngineLoop] | None:
        """Load a model into several processes, of which this is the first, if options name them."""
        tuning = load.options.tuning
        if not tuning.group.is_named:
            return None
        from backend.engine.distributed.messages import Form
        from backend.engine.distributed.topology import topology_of
        from backend.engine.leading.group_port import join_group

        if (topology := topology_of(tuning)) is None:
            return None
        form = Form(
            topology=topology,
            options=load.options,
            directory=load.directory,
            timeout_s=tuning.group.worker_timeout_s,
        )
        model, loop, self._port = join_group(form, self._server, self._share, self._fail)
        return model, loop

    def _serve(self, model: RunnableModel, loop: EngineLoop | EncoderLoop) -> None:
        """Tell the server that the model is loaded, and start listening to it."""
        grammars = GrammarPool(
            GrammarWorkshop(model.tokenizer, model.card),
            lambda names: self._server.send(Compiling(names)),
        )
        status = self._port.status(loop)
        card = loop.card
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
