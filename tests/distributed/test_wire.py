"""Values that go between processes come out as they went in, and nothing else comes out."""

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.config import ModelOptions, TuningOptions
from backend.core.delta import FinishReason
from backend.core.prompt import Prompt
from backend.core.request import GenerationRequest, SamplingParams
from backend.core.status import EngineStatus, HitKind, PromptCacheStatus
from backend.core.step import StepLogprobs, TokenStep
from backend.engine.command import Cancel, Submit
from backend.engine.distributed.channel import Channel, ChannelClosedError
from backend.engine.distributed.messages import Told, Turn, make_codec
from backend.engine.distributed.wire import WireError
from backend.engine.pace import Pace
from backend.engine.pacing import ChunkPacer
from backend.engine.side_jobs import SideJobs
from backend.engine.stream import Publication
from backend.errors import GrammarError, GroupLostError

pytestmark = pytest.mark.mlx

REQUEST = GenerationRequest(
    request_id="näme\n",
    prompt=Prompt((1, 2, 3), boundaries=(2,)),
    sampling=SamplingParams(temperature=0.7, logit_bias={5: -1.5}, seed=2**63),
    max_tokens=3,
    stop_token_ids=frozenset({7, 8}),
)
PACE = Pace(ChunkPacer(512, 2048, 0.5).pace(), SideJobs(512, 0.25).pace())
STATUS = EngineStatus(prompt_cache=PromptCacheStatus(hits={HitKind.EXACT: 2}))
STEP = TokenStep(4, FinishReason.STOP, StepLogprobs(-0.1, ((4, -0.1), (5, float("-inf")))))


@pytest.mark.parametrize(
    "message",
    [
        Turn(3, (Submit(REQUEST), Cancel("x")), PACE),
        Told((Publication("a", STEP),)),
        STATUS,
        ModelOptions(model="m", tuning=TuningOptions(seed=4)),
    ],
)
def test_messages_come_out_as_they_went_in(message):
    codec = make_codec()
    assert codec.decode(codec.encode(message)) == message


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(
    st.recursive(
        PLAIN, lambda inner: st.tuples(inner, inner) | st.dictionaries(st.integers(), inner)
    )
)
def test_containers_come_out_as_they_went_in(value):
    codec = make_codec()
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize("error", [GroupLostError("rank 1"), GrammarError("bad")])
def test_errors_keep_their_class_and_text(error):
    codec = make_codec()
    back = codec.decode(codec.encode(error))
    assert (type(back), str(back)) == (type(error), str(error))


@pytest.mark.parametrize(
    "content", [{"is": "Popen", "of": ["ls"]}, {"is": "Cancel", "of": []}, {"of": 1}, {"is": []}]
)
def test_only_known_values_are_made(content):
    with pytest.raises(WireError):
        make_codec().decode(json.dumps(content).encode())


def test_what_is_no_message_cannot_be_sent():
    with pytest.raises(WireError, match="object"):
        make_codec().encode(Told((object(),)))


@pytest.fixture
def channels():
    ours, theirs = (Channel(end, make_codec()) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(channels):
    ours, theirs = channels
    for number in range(3):
        ours.send(Cancel("x" * 10_000 * number))
    assert [len(theirs.receive().request_id) for _ in range(3)] == [0, 10_000, 20_000]
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)


def test_a_message_that_comes_in_pieces_is_waited_for_no_longer_than_that(channels):
    ours, theirs = channels
    data = make_codec().encode(Cancel("late"))
    whole = len(data).to_bytes(4, "big") + data
    for place in range(len(whole)):
        with pytest.raises(TimeoutError):
            theirs.receive(0.0)
        ours._socket.sendall(whole[place : place + 1])
    assert theirs.receive(0.0) == Cancel("late")


def test_a_message_of_many_levels_is_none():
    with pytest.raises(WireError):
        make_codec().decode(b"[" * 100_000)


def test_a_peer_that_hangs_up_is_noticed(channels):
    ours, theirs = channels
    noticed = threading.Event()
    theirs.watch(noticed.set)
    ours.send(Cancel("last"))
    ours.close()
    assert theirs.receive() == Cancel("last")
    with pytest.raises(ChannelClosedError):
        theirs.receive()
    assert noticed.wait(30.0)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_machine_that_vanishes_is_noticed_whether_or_not_bytes_are_on_their_way():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
    Channel(connection, make_codec())
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    idle, interval, count, unanswered = (
        connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
    )
    connection.close()
    assert unanswered == 1000 * (idle + interval * count) > 0


def test_a_message_of_absurd_length_closes_the_channel(channels):
    ours, theirs = channels
    ours.send_packed(b"")
    with pytest.raises(ChannelClosedError):
        theirs.receive()
