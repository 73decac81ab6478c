"""Memory, priorities and deadlines through the socket: who runs, who waits, who is refused."""

import asyncio
import re

import grpc
import pytest
from engine_driver import room_for
from serving import UNENDING, Stderr, code_of, served, stream
from waiting import until

from backend.core.engine_status import RequestPhase
from backend.model.checkpoint.weights import memory_bytes
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

CODE = grpc.StatusCode
CONTEXT = 150
GREEDY = {}
SEEDED = {"Temperature": 1.0, "Seed": 5}


def raw(prompt="ba bo bu ", **options):
    return pb.PredictOptions(Prompt=prompt, **{"IgnoreEOS": True, "Tokens": 12} | options)


def open_ended(number, **options):
    """A request without a limit of its own: it goes on to the end of the context."""
    return raw("ba bo bu be " * (3 + number), Tokens=0, **options)


def tight(network, tokens, *, rows=1):
    """Options with room for so many requests that hold so many tokens."""
    return [f"max_kv_bytes:{room_for(network, tokens, rows=rows)}", "expected_tokens:32"]


async def nothing():
    """Wait for nothing."""


async def ask_crowds(directory, crowds, options=(), *, after=nothing):
    """Return the replies to crowds of requests, each sent at once to an idle server.

    Args:
        after: Awaited after each crowd.
    """
    replies = []
    async with served(directory, MaxModelLen=CONTEXT, Options=options) as backend:
        for requests in crowds:
            async with backend.held(len(requests)):
                calls = [asyncio.ensure_future(backend.stub.Predict(each)) for each in requests]
            replies.append(await asyncio.gather(*calls))
            await until(lambda: backend.is_idle)
            # The pass that was in flight for the last of them ends a turn later.
            await until(lambda: backend.engine.status().memory_bytes["kv_active"] == 0)
            assert backend.engine.status().memory_bytes["kv_reserved"] == 0
            await after()
    return [[(reply.message, reply.tokens) for reply in crowd] for crowd in replies]


async def ask(directory, requests, options=()):
    [replies] = await ask_crowds(directory, [requests], options)
    return replies


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
@pytest.mark.one_in(2)
async def test_replies_are_the_same_when_requests_have_to_pause(
    tiny_models, networks, family, capfd
):
    log = Stderr(capfd)
    crowds = [
        [open_ended(number, **settings) for number in range(4)] for settings in (GREEDY, SEEDED)
    ]
    free = await ask_crowds(tiny_models(family), crowds)
    assert "pauses" not in log.text
    options = tight(networks(family), 100, rows=3)
    seen = 0

    async def paused():
        nonlocal seen
        await until(lambda: log.text.count("pauses") > seen)
        seen = log.text.count("pauses")

    assert await ask_crowds(tiny_models(family), crowds, options, after=paused) == free


async def test_a_lone_request_without_a_limit_ends_where_the_memory_does(
    tiny_models, networks, capfd
):
    [(whole, _)] = await ask(tiny_models("llama"), [open_ended(0)])
    options = tight(networks("llama"), 100)
    [(beginning, tokens)] = await ask(tiny_models("llama"), [open_ended(0)], options)
    assert 0 < tokens < 102
    assert whole.startswith(beginning)
    await Stderr(capfd).holds("its KV cache fills all")


async def test_a_prompt_is_refused_where_no_memory_is_left_for_a_small_pass(tiny_models, networks):
    prompt = "ba bo bu be " * 35
    async with served(
        tiny_models("llama"), Options=tight(networks("llama"), 300), GPUMemoryUtilization=1e-6
    ) as backend:
        length = (await backend.stub.TokenizeString(raw(prompt))).length
        assert 270 < length < 288
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await backend.stub.Predict(raw(prompt))
            assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
            assert f"the last 16 of {length} prompt tokens" in caught.value.details()
        assert (await backend.stub.Predict(raw())).tokens == 12


async def test_what_could_never_fit_is_refused_at_once_and_the_numbers_are_told(
    tiny_models, networks
):
    options = tight(networks("llama"), 100)
    async with served(tiny_models("llama"), Options=options) as backend:
        running = backend.stub.PredictStream(raw(Tokens=60))
        tokens = (await running.read()).tokens
        code, details = await code_of(backend.stub.Predict(raw(Tokens=100)))
        assert code is CODE.RESOURCE_EXHAUSTED
        pattern = r"(\d+) prompt tokens and 100 generated .* MiB: room for 100 tokens"
        assert re.search(pattern, details)
        while (reply := await running.read()) is not grpc.aio.EOF:
            tokens = reply.tokens
        assert tokens == 60


async def test_requests_whose_limits_do_not_fit_together_take_turns(tiny_models, networks):
    requests = [raw("ba bo " * (3 + number), Tokens=60) for number in range(5)]
    free = await ask(tiny_models("llama"), requests)
    assert await ask(tiny_models("llama"), requests, tight(networks("llama"), 90)) == free


async def test_the_prompt_cache_gives_way_before_anyone_waits(tiny_models, networks):
    options = tight(networks("llama"), 1500, rows=2)
    async with served(tiny_models("llama"), Options=options) as backend:
        for number in range(8):
            await backend.stub.Predict(raw(f"{number} " + "ba bo bu be " * 8, Tokens=2))
        stored = backend.engine.status().metrics["prompt_cache.bytes"]
        calls = [
            stream(backend.stub, raw(f"{number} bi", **UNENDING | {"Tokens": 1400}))
            for number in range(2)
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: backend.engine.status().metrics["slots_taken"] == 2)
        await until(lambda: backend.engine.status().metrics["prompt_cache.bytes"] < stored)
        assert backend.engine.status().metrics["waiting"] == 0
        assert [folded.last.tokens for folded in await asyncio.gather(*tasks)] == [1400, 1400]


async def test_the_host_says_how_much_of_the_memory_may_be_used(tiny_models):
    budgets = []
    for share in (0.2, 0.4):
        async with served(tiny_models("llama"), GPUMemoryUtilization=share) as backend:
            status = await backend.stub.Status(pb.HealthMessage())
            budgets.append(status.memory.breakdown["kv_budget"])
    assert 0 < budgets[0] < budgets[1] < memory_bytes()
    assert budgets[1] == pytest.approx(2 * budgets[0], rel=0.01)


async def test_a_higher_priority_is_served_first_and_an_unknown_one_is_normal(tiny_models):
    options = ["max_slots:1"]
    async with served(tiny_models("llama"), MaxModelLen=16_384, Options=options) as backend:
        running = backend.stub.PredictStream(raw(**UNENDING))
        await running.read()
        streams = {}
        for number, priority in enumerate(["low", "urgent", "normal", "high"], start=1):
            metadata = UNENDING["Metadata"] | {"priority": priority}
            request = raw(f"{priority} ba", **UNENDING | {"Metadata": metadata})
            streams[priority] = backend.stub.PredictStream(request)
            await until(lambda number=number: backend.engine.status().metrics["waiting"] == number)
        for priority in ("high", "urgent", "normal", "low"):
            running.cancel()
            running = streams[priority]
            await running.read()
        running.cancel()


@pytest.mark.parametrize("rpc", ["Predict", "PredictStream"])
@pytest.mark.parametrize("phase", RequestPhase)
async def test_a_deadline_ends_a_request_in_every_phase(shared, tiny_models, rpc, phase):
    """In the queue, behind one that never ends; in the prefill of a long prompt; in decoding."""
    options = ["max_slots:1", "prefill_chunk_alone:8", "max_cache_bytes:0"]
    async with shared(tiny_models("llama"), MaxModelLen=16_384, Options=options) as backend:
        blocker = None
        if phase is RequestPhase.WAITING:
            blocker = backend.stub.PredictStream(raw(**UNENDING))
            await blocker.read()
        prompt = "ba bo bu be " * (1000 if phase is RequestPhase.PREFILLING else 2)
        is_seen = False
        for timeout_s in (1.0, 4.0, 16.0):
            call = getattr(backend.stub, rpc)(raw(prompt, **UNENDING), timeout=timeout_s)
            ending = asyncio.create_task(code_of(call if rpc == "Predict" else drained(call)))
            await until(lambda ending=ending: phase in phases(backend) or ending.done())
            is_seen = phase in phases(backend)
            assert (await ending)[0] is CODE.DEADLINE_EXCEEDED
            if is_seen:
                break
            # A busy machine has not brought it so far: it needs more time.
        assert is_seen
        if blocker is not None:
            await until(lambda: backend.engine.status().metrics["waiting"] == 0)
            blocker.cancel()
        await until(lambda: backend.is_idle)
        assert backend.engine.status().memory_bytes["kv_reserved"] == 0


async def drained(call):
    async for _ in call:
        pass


def phases(backend):
    return [request.phase for request in backend.engine.status().requests]
