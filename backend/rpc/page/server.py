"""The dashboard on its own address and threads."""

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from functools import partial
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from backend.errors import BackendError
from backend.pb import backend_pb2 as pb
from backend.rpc.inspector import inspect_prompt_cache
from backend.rpc.page.application import Application, UnavailableError
from backend.rpc.reports import inspect_reply
from backend.rpc.servicer import ServedEngine
from common.address import AddressError, bind_problem, split_address

_ANSWER_TIMEOUT_S = 10.0
_POLL_S = 0.1

log = logging.getLogger(__name__)


class PageServer:
    """Serves the dashboard of one engine until its context exits; created on its event loop."""

    def __init__(self, address: str, engine: ServedEngine, token: str = "") -> None:
        """Listen.

        Args:
            address: `HOST:PORT`.
            engine: The engine.
            token: Required for its data, as for the RPCs; empty for none.

        Raises:
            AddressError: The address is malformed, not ours, or taken.
        """
        host, port = split_address(address)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        data = {"/inspect": self._inspect, "/prompt-cache": self._prompt_cache}
        server = _Server6 if host.startswith("[") else _Server
        try:
            self._server = server((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise AddressError(address, bind_problem(error)) from None
        self._server.set_app(Application(data, token=token, host=host))
        self.url = f"http://{host}:{self._server.server_port}/"
        serve = partial(self._server.serve_forever, _POLL_S)
        self._thread = threading.Thread(target=serve, name="page", daemon=True)
        if not token and not _is_loopback(host):
            log.warning("%s is open to anyone who can reach it: the backend has no token", self.url)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _inspect(self) -> bytes:
        return _json(inspect_reply(self._engine.model, self._engine.status()))

    def _prompt_cache(self) -> bytes:
        request = pb.InspectPromptCacheRequest()
        return _json(self._awaited(inspect_prompt_cache(self._engine, request, may_read=False)))

    def _awaited(self, work: Coroutine[Any, Any, Message]) -> Message:
        """Return the result of a coroutine on the event loop.

        Raises:
            UnavailableError: It failed, or took too long.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_ANSWER_TIMEOUT_S)
        except BackendError as error:
            raise UnavailableError(str(error)) from error
        except (TimeoutError, CancelledError):
            future.cancel()
            raise UnavailableError("the engine does not answer") from None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, _request: object, _client: object) -> None:
        """Ignore a caller that has left or sends nothing."""
        log.debug("a caller of the dashboard has left")


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    # A caller that sends nothing is dropped.
    timeout = _ANSWER_TIMEOUT_S

    def log_message(self, *_arguments: object) -> None:
        """Log nothing: an open page polls every second."""


def _json(message: Message) -> bytes:
    text: str = MessageToJson(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        indent=None,
    )
    return text.encode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
