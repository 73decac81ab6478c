import signal
import socket
import sys
from pathlib import Path

import pytest

from backend.cli.client import BackendClient
from backend.cli.server_process import (
    LOOPBACK,
    ServerError,
    ServerProcess,
    free_port,
    server_command,
)

PROGRAM = Path(__file__).with_name("health_server.py")


@pytest.fixture
def start(tmp_path):
    def start(mode):
        command = (sys.executable, str(PROGRAM), mode)
        return ServerProcess.start(tmp_path / "server.log", command=command)

    return start


async def test_a_ready_server_answers_and_stops(start):
    with start("well") as server:
        await server.wait_until_ready()
        async with BackendClient(server.address) as client:
            await client.check_health()
        assert server.stop() == 0


async def test_a_server_that_exits_is_reported_with_its_last_words(start):
    with (
        start("fail") as server,
        pytest.raises(ServerError, match="code 1: no luck today"),
    ):
        await server.wait_until_ready()


async def test_a_server_that_ignores_the_signal_is_killed(start):
    with start("stubborn") as server:
        await server.wait_until_ready()
        assert server.stop(timeout_s=0.1) == -signal.SIGKILL


async def test_leaving_the_context_stops_the_server(start):
    with start("well") as server:
        await server.wait_until_ready()
    assert server.stop() == 0


def test_a_checkout_is_started_by_its_script():
    assert server_command() == (str(Path(__file__).parents[2] / "run.sh"),)


def test_its_port_is_below_those_that_linux_and_macos_hand_out():
    with socket.create_server((LOOPBACK, free_port())) as server:
        assert server.getsockname()[1] < 32_768
