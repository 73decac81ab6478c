"""An HTTP server for a page and for metrics, which no caller can fill or hold up."""

import io
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Self, TypeAlias, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from common.address import AddressError, bind_problem, split_address

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    # Of `socketserver`, also for datagrams.
    Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]
    Caller: TypeAlias = tuple[str, int] | str

# Beyond them the one that has waited longest for its request is dropped.
MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 16 * 1024
_POLL_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection is kept.

    Attributes:
        request_s: For a request, from its first byte to its last, however slowly they come.
        answer_s: For the answer, however slowly it is read.
    """

    request_s: float = 10.0
    answer_s: float = 30.0


class HttpServer:
    """Answers with a WSGI application on threads of its own until its context exits."""

    def __init__(
        self,
        address: str,
        application: "WSGIApplication",
        name: str,
        patience: Patience = Patience(),
    ) -> None:
        """Listen.

        Args:
            address: `HOST:PORT`.
            application: Called from any thread. It gets no body of a request.
            name: Of its threads.

        Raises:
            AddressError: The address is malformed, not ours, or taken.
        """
        host, port = split_address(address)
        try:
            self._server = _Server(host.strip("[]"), port, patience)
        except OSError as error:
            raise AddressError(address, bind_problem(error)) from None
        self._server.set_app(application)
        serve = partial(self._server.serve_forever, _POLL_S)
        self._thread = threading.Thread(target=serve, name=name, daemon=True)

    @property
    def port(self) -> int:
        """The port: the requested one, or a free one instead of 0."""
        return self._server.server_port

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Connections:
    """The open connections, some with the time at which they are dropped; from any thread."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._asking: dict[socket.socket, float] = {}
        self._answered: dict[socket.socket, float] = {}
        self._dropped: set[socket.socket] = set()

    def __len__(self) -> int:
        return len(self._asking) + len(self._answered) + len(self._dropped)

    def add(self, connection: socket.socket) -> None:
        """Begin to wait for a request; if there are too many, drop the one that waits longest."""
        with self._lock:
            if len(self._asking) + len(self._answered) >= MAX_CONNECTIONS:
                self._drop_first(self._asking or self._answered)
            self._asking[connection] = time.monotonic() + self._patience.request_s

    def answer(self, connection: socket.socket) -> None:
        """Note that a request is complete.

        Raises:
            ConnectionError: The connection has been dropped.
        """
        with self._lock:
            if self._asking.pop(connection, None) is None:
                raise ConnectionError
            self._answered[connection] = time.monotonic() + self._patience.answer_s

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection, which is about to be closed."""
        with self._lock:
            self._asking.pop(connection, None)
            self._answered.pop(connection, None)
            self._dropped.discard(connection)

    def drop_late(self) -> None:
        """Drop those whose time is over."""
        now = time.monotonic()
        with self._lock:
            for each in (self._asking, self._answered):
                while each and next(iter(each.values())) < now:
                    self._drop_first(each)

    def _drop_first(self, connections: dict[socket.socket, float]) -> None:
        """End the wait of a connection's thread, which then closes it."""
        connection = next(iter(connections))
        del connections[connection]
        self._dropped.add(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, patience: Patience) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self.connections = _Connections(patience)
        super().__init__((host, port), _Handler)

    def verify_request(self, _request: object, _client: object) -> bool:
        """Refuse while threads of dropped connections have still to end."""
        return len(self.connections) < 2 * MAX_CONNECTIONS

    def process_request(self, request: "Request", client_address: "Caller") -> None:
        self.connections.add(cast("socket.socket", request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: "Request") -> None:
        self.connections.remove(cast("socket.socket", request))
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.connections.drop_late()

    def handle_error(self, _request: object, _client: object) -> None:
        log.debug("a caller has left")


class _Handler(WSGIRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Read a request's head within its limits, then answer."""
        head = self._head()
        if head is None:
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self.rfile = io.BytesIO(head)
        self.server.connections.answer(self.connection)
        super().handle()

    def _head(self) -> bytes | None:
        head = b""
        while len(head) <= MAX_HEAD_BYTES:
            line = self.rfile.readline(MAX_HEAD_BYTES)
            head += line
            if line in (b"\r\n", b"\n"):
                return head
            if not line:
                raise ConnectionError
        return None

    def log_message(self, *_arguments: object) -> None:
        """Log nothing: callers poll every second."""
