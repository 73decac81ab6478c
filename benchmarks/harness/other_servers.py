"""The servers of mlx-lm and llama.cpp, reached over HTTP as by their users."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

from backend.cli.server_process import LOOPBACK, free_port
from benchmarks.harness.baseline import QUIET
from benchmarks.harness.models import ROOT
from benchmarks.harness.workload import Speed, Timeline, Workload, speed

READY_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 300.0
_POLL_INTERVAL_S = 0.02
_OK = 200
_DATA = b"data: "
_LLAMA_CPP = ROOT / "scripts" / "real_models" / "llama_cpp.py"


class OtherServerError(Exception):
    """The server ended, or refused a request."""


class OtherServer:
    """A server of OpenAI's text completions on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def run(self, workload: Workload) -> Speed:
        """Generate all rows of a greedy workload at the same time, and return the speed."""
        rows = len(workload.prompts)
        with ThreadPoolExecutor(rows) as clients:
            started = time.perf_counter()
            replies = clients.map(self._stream, workload.prompts, [workload.new_tokens] * rows)
            return speed(started, list(replies))

    def is_ready(self) -> bool:
        """Tell whether it answers."""
        connection = HTTPConnection(LOOPBACK, self._port, timeout=READY_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == _OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _stream(self, prompt: str, new_tokens: int) -> Timeline:
        """Return the arrival times of a reply's tokens; its usage has their number."""
        row, asked = Timeline(), _asked(prompt, new_tokens)
        connection = HTTPConnection(LOOPBACK, self._port, timeout=REPLY_TIMEOUT_S)
        response = _answer(connection, json.dumps(asked))
        if response.status != _OK:
            raise OtherServerError(f"{response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data: {"):
                _add(row, json.loads(line.removeprefix(_DATA)))
        connection.close()
        return row


def _answer(connection: HTTPConnection, body: str) -> HTTPResponse:
    """Ask until it is answered: mlx-lm's server resets connections beyond its queue of five.

    Raises:
        OtherServerError: All were reset.
    """
    until = time.monotonic() + REPLY_TIMEOUT_S
    while time.monotonic() < until:
        try:
            connection.request("POST", "/v1/completions", body)
            return connection.getresponse()
        except ConnectionResetError:
            connection.close()
            time.sleep(_POLL_INTERVAL_S)
    raise OtherServerError("it resets every connection")


def _asked(prompt: str, new_tokens: int) -> Mapping[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,  # llama.cpp's; mlx-lm ignores it, and may end early
    }


def _add(row: Timeline, event: Mapping[str, object]) -> None:
    """Record an event with a text, and correct the number of tokens by one with the usage."""
    match event:
        case {"choices": [{"text": str()}, *_]}:
            row.mark(time.perf_counter(), len(row.times) + 1)
    match event:
        case {"usage": {"completion_tokens": int(count)}} if row.counts:
            row.counts[-1] = count


@contextmanager
def mlx_lm_server(
    directory: Path, environment: Mapping[str, str], threads: int
) -> Iterator[OtherServer]:
    """Start mlx-lm's server with a model, in an environment with this number of threads."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(directory)]
    command += ["--host", LOOPBACK, "--port", str(port), "--log-level", "ERROR"]
    own = {**environment, **QUIET, "OPENBLAS_NUM_THREADS": str(threads)}
    with _started(command, own, port) as server:
        yield server


@contextmanager
def llama_cpp_server(python: Path, file: Path, threads: int) -> Iterator[OtherServer]:
    """Start llama.cpp's server with a GGUF file, in the environment of a Python that has it."""
    port = free_port()
    command = [str(python), str(_LLAMA_CPP), str(file), str(port), str(threads)]
    with _started(command, {}, port) as server:
        yield server


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], port: int
) -> Iterator[OtherServer]:
    log = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdin=log, stdout=log, stderr=log
    ) as process:
        try:
            server = OtherServer(port)
            _wait(server, process)
            yield server
        finally:
            process.kill()


def _wait(server: OtherServer, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    while not server.is_ready():
        if process.poll() is not None or time.monotonic() > until:
            raise OtherServerError(f"{process.args!r} does not answer")
        time.sleep(_POLL_INTERVAL_S)
