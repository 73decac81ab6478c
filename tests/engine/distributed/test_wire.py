"""Values that go between processes come out as they went in, and nothing else comes out."""

import socket
import threading
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from engine_events import steps_of
from hypothesis import given
from hypothesis import strategies as st

from backend.config import ModelOptions, TuningOptions
from backend.core.engine_status import EngineStatus
from backend.core.guide import (
    GrammarParts,
    Guide,
    OfferedTool,
    ReplyRule,
    Thought,
    ThoughtBudget,
    ThoughtTexts,
)
from backend.core.metric_table import zeros
from backend.core.prefix_listing import HitKind, PromptCacheListing
from backend.core.prompt import MediaKind, PreparedMedium, Prompt
from backend.core.request import GenerationParams, GenerationRequest, SamplingParams
from backend.core.scoring import (
    Embedding,
    EmbeddingRequest,
    Judgement,
    Labels,
    Pooling,
    Scores,
)
from backend.core.step import FinishReason, PrefillDone, StepLogprobs, Steps, TokenStep
from backend.engine.background.jobs import BackgroundJobs
from backend.engine.distributed.gathering import Turn, make_codec
from backend.engine.grammars.pool import GrammarWorkshop
from backend.engine.messages.codec import (
    MAX_BUFFERS,
    MAX_FRAME_BYTES,
    Channel,
    ChannelClosedError,
    Codec,
    Frame,
    FrameReader,
    WireError,
)
from backend.engine.messages.protocol import (
    Answered,
    Cancel,
    Failed,
    Failure,
    Job,
    Load,
    News,
    Order,
    Passing,
    Snapshot,
    Stop,
    Submit,
    Told,
)
from backend.engine.port import Pace
from backend.engine.rows.pacing import PrefillPacer
from backend.engine.rows.row import Row
from backend.errors import DiskFullError, FieldError, GrammarError, GroupLostError

pytestmark = pytest.mark.mlx

REQUEST = GenerationRequest(
    params=GenerationParams(
        request_id="näme\n",
        sampling=SamplingParams(temperature=0.7, logit_bias={5: -1.5}, seed=2**63),
        max_tokens=3,
    ),
    prompt=Prompt((1, 2, 3), boundaries=(2,)),
    room=9,
    stop_token_ids=frozenset({7, 8}),
)
PACE = Pace(
    PrefillPacer(cap=512, cap_alone=2048, pause_s=0.5).pace(), BackgroundJobs(512, 0.25).pace()
)
BUDGET = ThoughtBudget(
    tokens=5, texts=ThoughtTexts(starts=("<a>",), ends=("</a>", "</b>"), parting="so"), is_open=True
)
BAD_PARTS = GrammarParts(rules=(1,))
STATUS = EngineStatus(metrics=zeros() | {"prompt_cache.hits.exact": 2, "turn_s": 0.5})
STEP = TokenStep(4, FinishReason.STOP, StepLogprobs(-0.1, ((4, -0.1), (5, float("-inf")))))


@pytest.mark.parametrize(
    "message",
    [
        Load(
            ModelOptions(model="m", models_dir=Path("/m"), tuning=TuningOptions.of(seed=4)),
            Path("/m/a"),
        ),
        Submit(REQUEST, (4, 5)),
        Job(3, EmbeddingRequest(token_ids=(1,), pooling=Pooling.CLS, is_normalized=True)),
        Stop(),
    ],
)
def test_orders_come_out_as_they_went_in(message):
    codec = Codec(Order)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Told({"a": steps_of(STEP), "b": Steps(PrefillDone(3, 1.5, HitKind.LONGER))}),
        Told(failures={"a": Failure.of(GrammarError("bad"))}),
        Snapshot(STATUS),
        Answered(4, Scores(((-0.5, -1.0), (float("-inf"),)))),
        Answered(5, Judgement((0.5, -2.0))),
        Answered(6, Judgement(())),
        Answered(7, Labels(b"12345678")),
        Answered(
            8,
            Embedding(data=b"12345678", dim=2, is_pooled=True, prompt_tokens=3),
        ),
        Answered(9, PromptCacheListing(recomputed_tokens=3)),
        Passing(["a", "b"], has_job=True),
    ],
)
def test_news_comes_out_as_it_went_in(message):
    codec = Codec(News)
    assert codec.decode(codec.encode(message)) == message


def test_the_plan_of_a_turn_comes_out_as_it_went_in():
    turn = Turn(3, (Submit(REQUEST), Cancel("x")), PACE)
    codec = make_codec()
    assert codec.decode(codec.encode(turn)) == turn


SAMPLES = {int: 7, float: 0.25, str: "näme", Mapping[int, float]: {5: -1.5}}


def unlike(kind, default=MISSING):
    """Return a value of a type other than the default; of a dataclass, in each of its fields."""
    if isinstance(kind, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{each.name: unlike(kinds[each.name], each.default) for each in fields(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(each for each in kind if each is not default)
    return not default if kind is bool else SAMPLES[kind]


def test_every_parameter_of_a_call_arrives_in_the_rows_of_all_ranks():
    params, standard = unlike(GenerationParams), GenerationParams(request_id="")
    for values, defaults in ((params, standard), (params.sampling, standard.sampling)):
        names = [each.name for each in fields(values)]
        assert not [name for name in names if getattr(values, name) == getattr(defaults, name)]
    order = Submit(GenerationRequest(params=params, prompt=Prompt((1, 2)), room=5))
    first, others = Codec(Order), make_codec()
    received = first.decode(first.encode(order))
    turn = others.decode(others.encode(Turn(1, (received,), PACE)))
    assert Row(received.request).params == Row(turn.commands[0].request).params == params


def test_what_guides_a_reply_comes_out_as_it_went_in():
    tools = (OfferedTool("note_add", '{"type": "object"}'),)
    rule = ReplyRule(tools=tools, format="hermes_json", thought=Thought(ends=("</think>",)))
    order = Submit(replace(REQUEST, guide=Guide(rule=rule, budget=BUDGET)))
    codec = Codec(Order)
    assert codec.decode(codec.encode(order)) == order


@pytest.mark.parametrize("rules", [("start: /a/", "b: /b/"), ()])
@pytest.mark.parametrize("budget", [BUDGET, None])
def test_a_grammar_goes_from_rank_to_rank(rules, budget):
    # Nothing is compiled, so there is no need of a vocabulary.
    workshop = GrammarWorkshop(object(), object())
    sent = workshop.read(GrammarParts(rules=rules, budget=budget))
    codec = make_codec()
    codec.read_grammar = workshop.read
    turn = Turn(3, (Submit(replace(REQUEST, grammar=sent)),), PACE)
    [arrived] = codec.decode(codec.encode(turn)).commands
    assert arrived.request.grammar.parts == sent.parts
    assert replace(arrived.request, grammar=None) == REQUEST


def test_a_grammar_of_other_parts_is_refused():
    codec = Codec(Order, GrammarWorkshop(object(), object()).read)
    payload = codec.encode(Submit(replace(REQUEST, grammar=codec.read_grammar(BAD_PARTS)))).payload
    with pytest.raises(WireError, match="cannot be read"):
        codec.decode(Frame(payload))


@given(st.lists(st.tuples(st.sampled_from(["f4", "i8", "u1", "f2"]), st.lists(st.integers(0, 3)))))
def test_arrays_follow_a_message_as_raw_buffers(kinds):
    arrays = {str(n): np.ones(shape, kind) * n for n, (kind, shape) in enumerate(kinds)}
    arrays["transposed"] = np.arange(6, dtype=np.int32).reshape(2, 3).T
    prepared = PreparedMedium(MediaKind.IMAGE, b"d", "t", (1,), arrays, frozenset("m"))
    codec, reader = Codec(News), FrameReader()
    frame = codec.encode(Answered(1, prepared))
    assert len(frame.buffers) == len(arrays)
    (received,) = reader.feed(b"".join(frame.parts()))
    back = codec.decode(received).result.inputs
    assert back.keys() == arrays.keys()
    for name, sent in arrays.items():
        assert back[name].dtype == sent.dtype
        np.testing.assert_array_equal(back[name], sent)


@pytest.mark.parametrize(
    "error", [GroupLostError("rank 1"), GrammarError("bad"), DiskFullError("full", field="experts")]
)
def test_errors_keep_their_class_their_text_and_their_field(error):
    codec = Codec(News)
    back = codec.decode(codec.encode(Failed(Failure.of(error)))).failure.error()
    assert (type(back), str(back)) == (type(error), str(error))
    if isinstance(error, FieldError):
        assert (back.field, back.problem) == (error.field, error.problem)


@pytest.mark.parametrize(
    "content",
    [
        ["Popen", ["ls"]],
        ["Cancel"],
        ["Cancel", 5],
        {"type": "Cancel"},
        7,
        None,
        ["Submit", {"request_id": "a"}],
    ],
)
def test_only_known_values_are_made(content):
    with pytest.raises(WireError):
        Codec(Order).decode(Frame(msgspec.msgpack.encode(content)))


def test_an_array_that_does_not_follow_is_none():
    place = msgspec.msgpack.encode((3, "<f4", (1,)))
    job = ["Job", 1, ["PrepareMedium", "image", msgspec.msgpack.Ext(1, place), 2.0, b""]]
    frame = Frame(msgspec.msgpack.encode(job), [b"abcd"])
    with pytest.raises(WireError):
        Codec(Order).decode(frame)


def test_what_is_no_message_cannot_be_sent():
    with pytest.raises(WireError, match="object"):
        Codec(News).encode(Told({"a": object()}))


@pytest.mark.parametrize(
    "inputs",
    [
        {"large": np.zeros(MAX_FRAME_BYTES + 1, np.uint8)},
        {f"{n}": np.zeros(1, np.uint8) for n in range(MAX_BUFFERS + 1)},
    ],
    ids=["bytes", "arrays"],
)
def test_what_no_reader_would_take_is_not_sent(inputs):
    prepared = PreparedMedium(MediaKind.IMAGE, b"d", "t", (1,), inputs)
    codec = Codec(News)
    with pytest.raises(WireError, match="may be one"):
        codec.encode(Answered(1, prepared))
    assert not codec.encode(Snapshot(STATUS)).buffers


@pytest.fixture
def channels():
    ours, theirs = (Channel(end, Codec(Order)) for end in socket.socketpair())
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
    whole = b"".join(Codec(Order).encode(Cancel("late")).parts())
    for place in range(len(whole)):
        with pytest.raises(TimeoutError):
            theirs.receive(0.0)
        ours.socket.sendall(whole[place : place + 1])
    assert theirs.receive(0.0) == Cancel("late")


def test_a_message_of_many_levels_is_none():
    with pytest.raises(WireError):
        Codec(Order).decode(Frame(b"\x91" * 100_000))


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
    ours.socket.sendall(b"\xff" * 8)
    with pytest.raises(ChannelClosedError):
        theirs.receive()
