"""Whatever process goes: requests are told, nothing is left behind, and the next load works."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial

import grpc
import grpc.aio
import pytest
from engine_driver import endless_request, make_request, prompt_of
from groups import Outcome, descendants, grouped, is_alive, take, workers, workers_of
from serving import Stub
from waiting import until

from backend.config import ModelOptions, TuningOptions
from backend.core.engine_status import EngineState, RequestPhase
from backend.core.request import SamplingParams
from backend.engine.engine import Engine
from backend.engine.processes import ending
from backend.errors import (
    GenerationFailedError,
    GroupNotFormedError,
    LoadCancelledError,
    LoadError,
    RequestCancelledError,
)
from backend.pb import backend_pb2 as pb
from backend.pipeline.served_model import ServedModel

pytestmark = pytest.mark.mlx

LONG = 3000


def in_phase(engine, phase):
    return any(row.phase is phase for row in engine.status().requests)


async def test_a_rank_that_dies_costs_no_request(engine, small_llama):
    await engine.load(grouped(small_llama, 2, prefill_chunk=16, max_cache_bytes=0))
    requests = [make_request(f"a{i}", prompt_of(120, i), max_tokens=60) for i in range(3)]
    alone = [(await take(engine, request)).tokens for request in requests]
    endless = endless_request("endless")
    for number, rank in enumerate((1, 0), start=1):
        outcomes = [Outcome() for _ in requests]
        calls = map(partial(take, engine), [*requests, endless], [*outcomes, Outcome()])
        *streams, last = [asyncio.ensure_future(call) for call in calls]
        # Rank 1 goes with the prompts that have just come, rank 0 amid the replies.
        await asyncio.sleep(0)
        await until(lambda rank=rank, got=outcomes: rank == 1 or any(each.tokens for each in got))
        before = workers()
        os.kill(before[rank], signal.SIGKILL)
        assert [outcome.tokens for outcome in await asyncio.gather(*streams)] == alone
        await until(lambda before=before: not any(map(is_alive, before)))
        await until(lambda number=number: engine.status().metrics["restarts"] == number)
        last.cancel()
        status = engine.status()
        reason = status.latest_restarts[-1].reason
        assert "SIGKILL" in reason
        assert ("rank 1 of 2" in reason) == (rank == 1)
    await engine.free()
    assert engine.status().state is EngineState.UNINITIALIZED
    assert not workers()


async def test_a_request_that_ends_a_group_each_time_fails_and_its_neighbour_finishes(
    engine, small_llama, with_fault
):
    poison = 7
    with_fault(f"segv:{poison}")
    await engine.load(grouped(small_llama, 2))
    prompt = [token for token in prompt_of(20) if token != poison]
    bias = SamplingParams(logit_bias={poison: -100.0})
    neighbour = partial(endless_request, token_ids=prompt, sampling=bias)
    got = Outcome()
    stream = asyncio.ensure_future(take(engine, neighbour("n"), got))
    await until(lambda: got.tokens)
    with pytest.raises(GenerationFailedError, match="2 times in a row over this request"):
        await take(engine, make_request("p", [3, poison, 4], max_tokens=5))
    count = len(got.tokens) + 20
    await until(lambda: len(got.tokens) >= count)
    stream.cancel()
    alone = await take(engine, neighbour("alone"), leave_after=count)
    assert got.tokens[:count] == alone.tokens[:count]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.one_in(2)
async def test_a_rank_that_hangs_is_told_and_can_be_freed(small_llama, caplog, rank):
    engine = Engine(serve=ServedModel.of, long_turn_s=1.0)
    await engine.load(grouped(small_llama, 2))
    stream = asyncio.ensure_future(take(engine, endless_request("a")))
    await until(partial(in_phase, engine, RequestPhase.ACTIVE))
    before = workers()
    os.kill(before[rank], signal.SIGSTOP)
    await until(lambda: "may be stuck" in caplog.text and engine.status().metrics["turn_s"] >= 1.0)
    assert engine.status().state is EngineState.ERROR
    os.kill(before[rank], signal.SIGCONT)
    await until(lambda: "goes on" in caplog.text)
    await until(lambda: engine.status().state is EngineState.BUSY)
    os.kill(before[rank], signal.SIGSTOP)
    # More than a connection holds that nobody reads.
    waiting = [
        asyncio.ensure_future(take(engine, make_request(f"b{i}", prompt_of(LONG, i))))
        for i in range(200)
    ]
    await until(lambda: len(engine.calls.requests) == 201)
    await until(lambda: engine.status().metrics["turn_s"] >= 1.0)
    async with asyncio.timeout(30.0):
        await engine.free()
    errors = await asyncio.gather(stream, *waiting, return_exceptions=True)
    assert {type(error) for error in errors} == {RequestCancelledError}
    # The kernel ends a rank with the one that started it, a moment later.
    await until(lambda: not any(map(is_alive, before)))
    assert engine.status().metrics["turn_s"] == 0.0
    await engine.close(drain_timeout_s=0.0)


async def test_a_group_with_nothing_to_do_is_not_stuck(engine, small_llama):
    await engine.load(grouped(small_llama, 2))
    await take(engine, make_request("a", prompt_of(9)))
    engine.cancel("never known")
    await until(lambda: engine.status().metrics["turn_s"] == 0.0)
    stream = asyncio.ensure_future(take(engine, endless_request("b")))
    await until(partial(in_phase, engine, RequestPhase.ACTIVE))
    engine.cancel("b")
    await until(lambda: engine.status().state is EngineState.READY)
    await until(lambda: engine.status().metrics["turn_s"] == 0.0)
    stream.cancel()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_at_load_fails_the_load(engine, small_llama, with_fault, rank):
    with_fault(f"load:{rank}")
    told = f"rank {rank}.*SIGKILL" if rank else "SIGKILL"
    with pytest.raises(LoadError, match=told):
        await engine.load(grouped(small_llama, 2))
    assert engine.status().state is EngineState.ERROR
    await until(lambda: not workers())


async def test_a_rank_that_never_comes_is_given_up_and_named(engine, small_llama):
    # An address for documentation: no machine has it.
    tuning = TuningOptions.of(hosts="127.0.0.1,192.0.2.7", worker_timeout_s=2)
    with pytest.raises(GroupNotFormedError, match=r"rank 1 \(192\.0\.2\.7\).*within 2 s"):
        await engine.load(ModelOptions(model=str(small_llama), tuning=tuning))
    assert not workers()


@pytest.mark.parametrize(
    ("fate", "timeout_s", "words"),
    [
        ("exit 3", 30, "exit code 3"),
        ("kill -KILL $$", 30, "SIGKILL"),
        ("kill -ALRM $$", 30, "has one ended"),
        ("kill -40 $$", 30, "was ended by signal 40"),
        ("sleep 90", 0.1, "hung up"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(fate, timeout_s, words):
    with subprocess.Popen(["/bin/sh", "-c", fate]) as process:
        assert words in ending(process, timeout_s=timeout_s)
        process.kill()


async def test_a_load_that_is_cancelled_leaves_no_process(engine, small_llama):
    load = asyncio.ensure_future(engine.load(grouped(small_llama, 2)))
    await until(lambda: len(workers()) == 2)
    await engine.free()
    with pytest.raises(LoadCancelledError):
        await load
    await until(lambda: not workers())


async def test_a_killed_server_takes_its_workers_along(small_llama):
    command = [sys.executable, "-m", "backend", "--addr", "127.0.0.1:0"]
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    line = ""
    while "listening on" not in line:
        line = (await server.stderr.readline()).decode()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{line.rsplit(':')[-1].strip()}") as channel:
        stub = Stub(channel)
        request = pb.ModelOptions(Model=str(small_llama), TensorParallelSize=2)
        assert (await stub.LoadModel(request)).success
        reply = await stub.Predict(pb.PredictOptions(Prompt="ba be", Tokens=5, IgnoreEOS=True))
        assert reply.tokens == 5
        alive = descendants(server.pid)
        assert len(workers_of(server.pid)) == 2
        server.kill()
        await server.communicate()
    await until(lambda: not any(map(is_alive, alive)))
