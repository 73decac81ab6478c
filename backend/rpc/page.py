"""The dashboard: its page and its data as a WSGI application, and the server of it."""

import asyncio
import hmac
import ipaddress
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from backend.errors import BackendError
from backend.pb import backend_pb2 as pb
from backend.pipeline.served_model import ServedEngine
from backend.rpc.reports import inspect_reply
from backend.rpc.services import inspect_prompt_cache
from common.address import split_address
from common.rpc import WRONG_BEARER
from common.web import HttpServer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

Answer: TypeAlias = tuple[HTTPStatus, str, bytes]
Ask: TypeAlias = Callable[[], bytes]

_FILES = Path(__file__).parent / "page_files"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Nothing external, nothing inline; no other page may embed this one or read its data.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)

log = logging.getLogger(__name__)


class UnavailableError(Exception):
    """The data is not available; the message says why."""


class Application:
    """Answers GET: the page's files without a token, its data with the token.

    Without a token, a request must name this server by its address or as `localhost`: a web site
    cannot point its name at this machine and read the data.
    """

    def __init__(self, data: Mapping[str, Ask], *, token: str, host: str) -> None:
        """Read the files of the page.

        Args:
            data: Functions by path that return JSON, or raise `UnavailableError`; from any thread.
            token: Required from callers of `data`; empty for none.
        """
        self._data = data
        self._expected = f"Bearer {token}".encode() if token else b""
        self._host = host.strip("[]").lower()
        self._files = {
            f"/{path.name}": (f"{_KINDS[path.suffix]}; charset=utf-8", path.read_bytes())
            for path in _FILES.iterdir()
        }
        self._files["/"] = self._files["/page.html"]

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        """Answer a request."""
        status, kind, body = self._answer(environ)
        own = (("Content-Type", kind), ("Content-Length", str(len(body))))
        extra = [("WWW-Authenticate", "Bearer")] if status is HTTPStatus.UNAUTHORIZED else []
        start_response(f"{status.value} {status.phrase}", [*own, *_HEADERS, *extra])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: Mapping[str, Any]) -> Answer:
        path = environ.get("PATH_INFO", "")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only to be read")
        if not self._expected and not self._is_own_name(environ.get("HTTP_HOST", "")):
            problem = "use the address of this server, or localhost, in the place of its name"
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST, problem)
        if path in self._files:
            return HTTPStatus.OK, *self._files[path]
        if path not in self._data:
            return _refusal(HTTPStatus.NOT_FOUND, "there is nothing here")
        if not self._may_read(environ.get("HTTP_AUTHORIZATION", "")):
            return _refusal(HTTPStatus.UNAUTHORIZED, WRONG_BEARER)
        return self._asked(self._data[path])

    def _asked(self, ask: Ask) -> Answer:
        try:
            return HTTPStatus.OK, "application/json", ask()
        except UnavailableError as error:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _may_read(self, given: str) -> bool:
        # WSGI gives bytes as Latin-1.
        return not self._expected or hmac.compare_digest(given.encode("latin-1"), self._expected)

    def _is_own_name(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        return name in ("localhost", self._host) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(status: HTTPStatus, problem: str) -> Answer:
    return status, "application/json", json.dumps({"error": problem}).encode()


_ANSWER_TIMEOUT_S = 10.0


class PageServer:
    """Serves the dashboard of one engine until its context exits; created on its event loop."""

    def __init__(self, address: str, engine: ServedEngine, token: str = "") -> None:
        """Listen at `HOST:PORT`; a token is required for the data, as for RPCs, unless empty."""
        host, _ = split_address(address)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        data = {"/inspect": self._inspect, "/prompt-cache": self._prompt_cache}
        application = Application(data, token=token, host=host)
        self._server = HttpServer(address, application, "page")
        self.url = f"http://{host}:{self._server.port}/"
        if not token and not _is_loopback(host):
            log.warning("%s is open to anyone who can reach it: the backend has no token", self.url)

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def _inspect(self) -> bytes:
        return _json(inspect_reply(self._engine.model, self._engine.status()))

    def _prompt_cache(self) -> bytes:
        request = pb.InspectPromptCacheRequest()
        return _json(self._awaited(inspect_prompt_cache(self._engine, request, may_read=False)))

    def _awaited(self, work: Coroutine[Any, Any, Message]) -> Message:
        """Return the result of a coroutine on the event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_ANSWER_TIMEOUT_S)
        except BackendError as error:
            raise UnavailableError(str(error)) from error
        except (TimeoutError, CancelledError):
            future.cancel()
            raise UnavailableError("the engine does not answer") from None


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
