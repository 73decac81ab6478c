"""A hub of models on this machine."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A hub on this machine: one model, whose weights may be held back, or damaged on the way."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b"{}",
            "model.safetensors": b"w" * 300_000,
            "original/model.safetensors": b"w" * 300_000,
            "consolidated.safetensors": b"w" * 300_000,
            "own.py": b"pass",
            "picture.png": b"p",
        }
        # As many answers with weights are damaged.
        self.damages = 0
        self.holds_weights = threading.Event()
        self.weights_wanted = threading.Event()
        self.client_left = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def sent(self, file: str, body: bytes) -> bytes:
        """The bytes that arrive of a file."""
        if file != "model.safetensors" or not self.damages:
            return body
        self.damages -= 1
        return b"x" + body[1:]

    def page(self, path: str) -> object | None:
        """The answer of the API under a path, `None` where there is nothing."""
        name, _, rest = path.removeprefix("/api/models/").partition("/")
        if f"{name}/{rest}".startswith("org/tiny/revision/"):
            return {"id": "org/tiny", "sha": COMMIT, "siblings": []}
        if f"{name}/{rest}".startswith("org/tiny/tree/"):
            return [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                for path, content in self.files.items()
            ]
        return None


def _etag(content: bytes) -> str:
    """Git's checksum, as the hub has it for small files."""
    head = b"blob %d\0" % len(content)
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(sends_body=False)

        def do_GET(self) -> None:
            self._answer(sends_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, sends_body: bool) -> None:
            file = self.path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            if file in hub.files:
                body, status = hub.files[file], 200
            else:
                page = hub.page(self.path)
                body, status = json.dumps(page or {}).encode(), 200 if page else 404
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_etag(body)}"')
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if sends_body:
                body = hub.sent(file, body)
                self._send(body, is_held=file == "model.safetensors" and hub.holds_weights.is_set())

        def _send(self, body: bytes, *, is_held: bool) -> None:
            if is_held:
                self.wfile.write(body[:1000])
                hub.weights_wanted.set()
                with contextlib.suppress(ConnectionError):
                    self.connection.recv(1)  # returns when the client is gone
                hub.client_left.set()
            else:
                self.wfile.write(body)

    return Handler
