"""A thousand half-open connections on the HTTP ports of a real server hold up nobody."""

import socket
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_process import TIMEOUT_S, real_backend
from waiting import wait_until

from backend.cli.server_process import free_port
from backend.pb import backend_pb2 as pb
from common.web import MAX_CONNECTIONS

CONNECTIONS = 1000
MOST_S = 5.0
# Of the system, and of threads that are about to end.
SPARE = 16


def open_files(backend):
    return len(list(Path(f"/proc/{backend.process.pid}/fd").iterdir()))


def read(port, path):
    """Return how long a caller waits."""
    start = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=TIMEOUT_S) as reply:
        assert reply.read()
    return time.monotonic() - start


@pytest.fixture(scope="module")
def ports():
    """The HTTP ports of the server, by the option that opens each."""
    return {option: free_port() for option in ("--metrics-addr", "--dashboard")}


@pytest.fixture(scope="module")
def backend(tmp_path_factory, ports):
    options = " ".join(f"{option} 127.0.0.1:{port}" for option, port in ports.items())
    words = ("sh", "-c", f'exec "$@" {options}', "sh")
    with real_backend(tmp_path_factory.mktemp("flood") / "log", prefix=words) as backend:
        backend.stub.Status(pb.HealthMessage(), timeout=TIMEOUT_S)
        yield backend


@pytest.mark.parametrize(("option", "path"), [("--metrics-addr", "metrics"), ("--dashboard", "")])
@pytest.mark.one_in(2)
def test_half_open_connections_stay_few_and_others_are_answered(backend, ports, option, path):
    port = ports[option]
    with ExitStack() as others:
        read(port, path)
        files = open_files(backend)
        for number in range(CONNECTIONS):
            half = others.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            half.send(b"GET /")
            if number % 250 == 0:
                assert read(port, path) < MOST_S
                backend.stub.Health(pb.HealthMessage(), timeout=MOST_S)
        assert read(port, path) < MOST_S
        assert open_files(backend) <= files + MAX_CONNECTIONS + SPARE
        others.close()
        wait_until(lambda: open_files(backend) <= files + 1)
