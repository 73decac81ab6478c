"""Engine processes come and go, and nothing of them is left behind or waited for in vain."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from engine_driver import endless_request, make_request, prompt_of
from groups import is_alive, workers
from waiting import until

from backend.config import ModelOptions, TuningOptions
from backend.core.engine_status import (
    EngineState,
)
from backend.core.guide import Guide, ReplyRule
from backend.core.prompt import MediaSpan
from backend.engine.engine import Engine
from backend.engine.messages.codec import MAX_FRAME_BYTES
from backend.engine.supervision.engine_process import EngineProcess
from backend.engine.supervision.open_calls import OpenCalls
from backend.errors import (
    EngineFailedError,
    InvalidRequestError,
    ModelNotLoadedError,
    RequestCancelledError,
)
from backend.pipeline.served_model import ServedModel

RELOAD_TIMEOUT_S = 10


def options(directory, **tuning):
    return ModelOptions(model=str(directory), tuning=TuningOptions.of(**tuning))


async def take(engine, request, tokens):
    try:
        async for steps in engine.submit(engine.model, request):
            tokens += steps.token_ids
    finally:
        engine.cancel(request.request_id)


async def streaming(engine, request=None):
    """Return a stream that has begun, endless unless it is given, and the tokens that it gets."""
    tokens = []
    request = request or endless_request("endless")
    stream = asyncio.ensure_future(take(engine, request, tokens))
    await until(lambda: tokens or stream.done())
    return stream, tokens


async def stopped_spare(engine):
    """Have a process wait for a model, and stop it."""
    known = set(workers())
    engine.prepare()
    await until(lambda: set(workers()) - known)
    (spare,) = set(workers()) - known
    os.kill(spare, signal.SIGSTOP)
    return spare


@pytest.fixture
async def engine():
    engine = Engine(serve=ServedModel.of)
    try:
        yield engine
    finally:
        await engine.close(drain_timeout_s=0.0)
    assert not workers()


@pytest.mark.mlx
async def test_a_process_ends_even_if_who_waits_for_its_end_leaves():
    process = await EngineProcess.started(lambda *_: None, lambda *_: None, None)
    os.kill(process.process_id, signal.SIGSTOP)
    end = asyncio.ensure_future(process.end(3600.0))
    await asyncio.sleep(0)
    end.cancel()
    await asyncio.wait([end])
    await until(lambda: not process.is_alive)


@pytest.mark.mlx
async def test_a_process_ends_with_the_start_that_is_cancelled():
    known = set(workers())
    start = asyncio.ensure_future(EngineProcess.started(lambda *_: None, lambda *_: None, None))
    await asyncio.sleep(0)
    while not (started := set(workers()) - known):
        # The event loop must not go on: the start would end.
        pass
    start.cancel()
    await asyncio.wait([start])
    await until(lambda: not any(map(is_alive, started)))


@pytest.mark.mlx
async def test_free_tells_callers_before_a_recovery_has_ended(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    await stopped_spare(engine)
    stream, _ = await streaming(engine)
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: engine.process_id is None)
    freeing = asyncio.ensure_future(engine.free())
    with pytest.raises(RequestCancelledError):
        await stream
    assert not freeing.done()
    await freeing


@pytest.mark.mlx
async def test_a_request_too_large_for_the_wire_ends_alone(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    stream, tokens = await streaming(engine, make_request("a", prompt_of(9), max_tokens=200))
    request = make_request("large", [1, 2, 3])
    film = MediaSpan(0, 2, b"film", {"frames": np.zeros(MAX_FRAME_BYTES + 1, np.uint8)})
    request = replace(request, prompt=replace(request.prompt, media=(film,)))
    with pytest.raises(InvalidRequestError, match="may be one"):
        await take(engine, request, [])
    await stream
    assert (len(tokens), engine.status().metrics["restarts"]) == (200, 0)


@pytest.mark.mlx
async def test_a_process_that_hangs_while_it_loads_again_counts_as_one_that_could_not(
    engine, tiny_models, caplog
):
    await engine.load(options(tiny_models("llama"), reload_timeout_s=RELOAD_TIMEOUT_S))
    spare = await stopped_spare(engine)
    endless, _ = await streaming(engine)
    stream, tokens = await streaming(engine, make_request("a", prompt_of(9), max_tokens=600))
    os.kill(engine.process_id, signal.SIGKILL)
    await until(lambda: engine.status().metrics["restarts"] == 1)
    await stream
    endless.cancel()
    assert len(tokens) == 600
    assert not is_alive(spare)
    assert f"was not loaded within {RELOAD_TIMEOUT_S} s" in caplog.text


@pytest.mark.mlx
async def test_a_recovery_that_fails_in_an_unforeseen_way_ends_all_that_is_open(tiny_models):
    environment = dict(os.environ)
    engine = Engine(serve=ServedModel.of, environment=environment)
    await engine.load(options(tiny_models("llama")))
    stream, _ = await streaming(engine)
    environment["BROKEN"] = "no value has a \0 in it"
    os.kill(engine.process_id, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="could not be replaced: embedded null byte"):
        await stream
    assert engine.status().state is EngineState.ERROR
    assert "embedded null byte" in engine.fault
    with pytest.raises(ModelNotLoadedError):
        engine.submit(engine.model, make_request("b", [1]))
    del environment["BROKEN"]
    await engine.load(options(tiny_models("llama")))
    await engine.close(drain_timeout_s=0.0)


@pytest.mark.mlx
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_load_that_ends_in_the_moment_of_its_cancellation_leaves_no_process(
    tiny_models, is_at_once
):
    def cancel_load(loaded, given):
        if is_at_once:
            load.cancel()
        else:
            asyncio.get_running_loop().call_soon(load.cancel)
        return ServedModel.of(loaded, given)

    engine = Engine(serve=cancel_load)
    load = asyncio.ensure_future(engine.load(options(tiny_models("llama"))))
    await asyncio.wait([load])
    assert load.cancelled()
    assert not workers()
    await engine.close(drain_timeout_s=0.0)


def test_another_thread_may_ask_for_work_that_comes_and_goes():
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    calls = OpenCalls()
    failures, has_ended = [], threading.Event()

    def ask():
        try:
            while not has_ended.is_set():
                assert not calls.awaits_turn
        except RuntimeError as error:
            failures.append(error)

    for number in range(200):
        calls.submit(make_request(f"kept {number}", [1]))
    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(20_000):
        calls.submit(make_request(f"passing {number}", [1]))
        calls.cancel(f"passing {number}")
    has_ended.set()
    thread.join()
    sys.setswitchinterval(interval_s)
    assert not failures


def test_a_process_lost_while_it_compiles_counts_against_that_request_only():
    calls = OpenCalls()
    guide = Guide(rule=ReplyRule(text='root ::= "a"'))
    entry, other = (calls.submit(make_request(name, [1], guide=guide)) for name in ("a", "b"))
    reason = EngineFailedError("it is gone")
    culprits = []
    for _ in range(2):
        assert culprits == []
        entry.is_sent = other.is_sent = True
        culprits = calls.note_loss(None, ["a"], reason)
    assert (culprits, other.losses) == ([entry], 0)
    other.is_sent = True
    assert calls.note_loss(None, [], reason) == []
    assert (other.losses, other.is_open) == (0, True)


def test_collections_of_the_server_leave_out_the_libraries_that_read_a_tokenizer():
    code = """
import gc
from pathlib import Path
from backend.config import ModelOptions
from backend.demo import MODEL_DIR
from backend.engine.supervision.text_part import read_text_part
read_text_part(ModelOptions(model=""), Path(MODEL_DIR))
print(gc.get_freeze_count(), len(gc.get_objects()))
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    left_out, looked_at = map(int, told)
    assert left_out > 10 * looked_at
