"""Rank 0 waits for the others: who is let in, and who cannot keep it waiting."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from backend.config import ModelOptions
from backend.engine.distributed.gathering import Form, Hello, gather, make_codec, software
from backend.engine.distributed.topology import Endpoint, Host, Topology, local_hosts
from backend.engine.messages.codec import Channel, ChannelClosedError
from backend.engine.messages.protocol import Failed
from backend.errors import GroupNotFormedError

ABSENT = "192.0.2.7"


pytestmark = pytest.mark.slow


def form_with(address, timeout_s):
    """Build a group of this machine and another rank."""
    topology = Topology((*local_hosts(1), Host((Endpoint(address, 1),))))
    options = ModelOptions(model="org/tiny")
    return Form(topology=topology, options=options, directory=Path(), timeout_s=timeout_s)


def gathered(form, newcomer):
    """Gather a group while somebody comes, who stays until that has ended."""
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(gather, form, make_codec(), {})
        with ExitStack() as held:
            while not gathering.done():
                with suppress(OSError):
                    channel = connected(form.topology.control)
                    held.callback(channel.close)
                    newcomer(channel)
                    break
            return gathering.result(60.0)


def connected(place):
    """Return a connection to a place where somebody listens."""
    return Channel(socket.create_connection((place.address, place.port)), make_codec())


@pytest.mark.parametrize(
    "said", [b"", b"\0", b"\0\0\0\x20\0\0\0\0{", b"GET / HTTP/1.1", b"\0\0\0\1\0\0\0\0\xc0"]
)
def test_a_stranger_keeps_nobody_waiting(said, monkeypatch):
    monkeypatch.setattr("backend.engine.distributed.gathering.HELLO_TIMEOUT_S", 0.05)
    with pytest.raises(GroupNotFormedError, match=f"{ABSENT}.*within 1 s"):
        gathered(form_with(ABSENT, 1.0), lambda channel: channel.socket.sendall(said))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_rank_of_this_machine_may_come_from_any_address_of_it(address):
    if not Endpoint(address, 0).is_local:
        pytest.skip(f"this machine has no {address}")
    hello = Hello(1, 2, 4711, 2**30, software())
    members = gathered(form_with(address, 60.0), lambda channel: channel.send(hello))
    for member in members:
        member.channel.close()
    assert [member.hello for member in members] == [hello]


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        (Hello(1, 2, 4711, 2**30, software()), f"rank 1 is at {ABSENT}"),
        (Hello(1, 2, 4711, 2**30, "mlx 0.1"), "rank 1 has mlx 0.1, and rank 0 has mlx-grpc"),
        (Hello(1, 4, 4711, 2**30, software()), "it was started for 4 ranks"),
    ],
)
def test_a_rank_that_does_not_belong_here_is_told_so_and_the_caller_too(hello, problem):
    def come(channel: Channel) -> None:
        channel.send(hello)
        told = channel.receive(30.0)
        assert isinstance(told, Failed)
        assert problem in told.failure.text
        with pytest.raises(ChannelClosedError):
            channel.receive(30.0)

    with pytest.raises(GroupNotFormedError, match=f"did not come.* was refused: {problem}"):
        gathered(form_with(ABSENT, 1.0), come)
