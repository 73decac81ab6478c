"""The facade and its process, on tiny models, without gRPC."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_driver import VOCAB, endless_request, make_request, prompt_of
from engine_events import events_of
from groups import workers
from serving import Stderr
from waiting import until

from backend.config import ModelOptions, TuningOptions
from backend.core.engine_status import EngineState
from backend.core.model import Reuse
from backend.core.step import FinishReason, PrefillDone
from backend.engine.engine import Engine
from backend.errors import (
    InvalidRequestError,
    LoadCancelledError,
    ModelNotFoundError,
    ModelNotLoadedError,
    OverloadedError,
    RequestCancelledError,
    ShuttingDownError,
)
from backend.pipeline.served_model import ServedModel

pytestmark = pytest.mark.mlx


def options(directory: Path, **tuning) -> ModelOptions:
    return ModelOptions(model=str(directory), tuning=TuningOptions.of(**tuning))


@pytest.fixture
async def engine():
    """Yield an engine that leaves no process."""
    engine = Engine(serve=ServedModel.of)
    try:
        yield engine
    finally:
        await engine.close(drain_timeout_s=0.0)
    assert not workers()


async def collect(engine, request):
    return [
        event async for steps in engine.submit(engine.model, request) for event in events_of(steps)
    ]


async def test_a_request_is_prefilled_and_decoded(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    first, *steps = await collect(engine, make_request("a", prompt_of(5), max_tokens=4))
    assert isinstance(first, PrefillDone)
    assert [s.finish_reason for s in steps] == [None, None, None, FinishReason.LENGTH]


async def test_the_card_tells_what_was_loaded(engine, tiny_models):
    card = await engine.load(options(tiny_models("qwen3")))
    assert (card.model_type, card.vocab_size, card.context_length) == ("qwen3", VOCAB, 4096)
    assert card.batches
    assert card.weights_bytes > 0


@pytest.mark.parametrize(
    ("family", "reuse"),
    [
        ("llama", Reuse.ANYWHERE),
        ("gemma3_text", Reuse.WITH_WINDOWS),
        ("qwen3_next", Reuse.AT_SNAPSHOTS),
    ],
)
async def test_the_card_tells_where_prefixes_can_be_taken_up(engine, tiny_models, family, reuse):
    assert (await engine.load(options(tiny_models(family)))).reuse is reuse


async def test_the_log_says_that_attention_runs_row_by_row(engine, tiny_models, capfd):
    card = await engine.load(options(tiny_models("llama4")))
    assert card.batches
    # A thread of the engine process writes it.
    await Stderr(capfd).holds("row by row: ChunkedKVCache")
    requests = [make_request(str(i), prompt_of(5, i), max_tokens=3) for i in range(3)]
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert [len(events) for events in results] == [4, 4, 4]


async def test_batching_can_be_switched_off(engine, tiny_models):
    assert not (await engine.load(options(tiny_models("llama"), batching=False))).batches


async def test_without_a_model_nothing_is_submitted(engine):
    with pytest.raises(ModelNotLoadedError, match="model not loaded"):
        engine.submit(engine.model, make_request("a", [1]))


async def test_a_second_load_replaces_the_first_and_ends_its_requests(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    running = asyncio.create_task(collect(engine, endless_request("a")))
    await asyncio.sleep(0)
    card = await engine.load(options(tiny_models("qwen3")))
    assert card.model_type == "qwen3"
    with pytest.raises(RequestCancelledError):
        await running


async def test_loading_what_is_loaded_leaves_requests_alone(engine, tiny_models):
    card = await engine.load(options(tiny_models("llama")))
    running = asyncio.create_task(collect(engine, make_request("a", prompt_of(5), max_tokens=50)))
    await asyncio.sleep(0)
    assert await engine.load(options(tiny_models("llama"))) == card
    assert len(await running) == 51


async def test_loads_at_once_run_one_after_another(engine, tiny_models):
    families = ("llama", "qwen3", "mamba2")
    cards = await asyncio.gather(*(engine.load(options(tiny_models(f))) for f in families))
    assert [card.model_type for card in cards] == list(families)
    assert engine.model.card.model_type == "mamba2"


async def test_a_model_that_is_not_there_leaves_the_one_before(engine, tiny_models, tmp_path):
    await engine.load(options(tiny_models("llama")))
    with pytest.raises(ModelNotFoundError):
        await engine.load(options(tmp_path / "nothing"))
    assert engine.model.card.model_type == "llama"


async def test_a_failed_load_is_told_by_the_status_and_can_be_mended(engine, tiny_models, tmp_path):
    with pytest.raises(ModelNotFoundError):
        await engine.load(options(tmp_path / "nothing"))
    assert engine.status().state is EngineState.ERROR
    await engine.load(options(tiny_models("llama")))
    assert engine.status().state is EngineState.READY


async def test_a_cancelled_load_leaves_nothing_and_another_works(engine, tiny_models):
    loading = asyncio.create_task(engine.load(options(tiny_models("llama"))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.model is None
    assert (await engine.load(options(tiny_models("qwen3")))).model_type == "qwen3"


async def test_a_load_that_is_cancelled_early_leaves_the_model_before_alone(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    model, before = engine.model, workers()
    running = asyncio.create_task(collect(engine, make_request("a", prompt_of(5), max_tokens=50)))
    loading = asyncio.create_task(engine.load(options(tiny_models("qwen3"))))
    await until(lambda: len(workers()) == 2)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert (engine.model, workers()) == (model, before)
    assert len(await running) == 51


async def test_free_ends_a_running_load(engine, tiny_models):
    loading = asyncio.create_task(engine.load(options(tiny_models("llama"))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.free()
    with pytest.raises(LoadCancelledError):
        await loading
    assert engine.model is None


async def test_free_ends_the_loads_that_wait_too_and_none_that_come_later(engine, tiny_models):
    families = ("llama", "qwen3", "mamba2")
    loads = [asyncio.create_task(engine.load(options(tiny_models(each)))) for each in families]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    freeing = asyncio.create_task(engine.free())
    await asyncio.sleep(0)
    later = await engine.load(options(tiny_models("llama")))
    await freeing
    ended = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(each) for each in ended] == [LoadCancelledError] * 3
    assert later.model_type == engine.model.card.model_type


async def test_free_gives_memory_back_and_ends_requests(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    running = asyncio.create_task(collect(engine, endless_request("a")))
    await asyncio.sleep(0)
    await engine.free()
    with pytest.raises(RequestCancelledError):
        await running
    with pytest.raises(ModelNotLoadedError):
        engine.submit(engine.model, make_request("b", [1]))
    assert engine.status().state is EngineState.UNINITIALIZED
    await engine.load(options(tiny_models("llama")))
    assert len(await collect(engine, make_request("c", [1], max_tokens=2))) == 3


async def test_free_ends_the_process_and_all_of_its_memory_is_back(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    process_id = engine.process_id
    assert workers() == [process_id]
    await engine.free()
    assert not workers()
    assert engine.process_id is None


async def test_a_process_waits_before_it_is_needed_and_again_after_free(engine, tiny_models):
    engine.prepare()
    await until(lambda: len(workers()) == 1)
    (waiting,) = workers()
    await engine.load(options(tiny_models("llama")))
    assert engine.process_id == waiting
    await engine.free()
    await until(lambda: len(workers()) == 1)
    assert workers() != [waiting]


async def test_a_process_that_waits_and_dies_is_replaced_by_the_load(engine, tiny_models):
    engine.prepare()
    await until(lambda: len(workers()) == 1)
    os.kill(*workers(), signal.SIGKILL)
    await engine.load(options(tiny_models("llama")))
    assert len(await collect(engine, make_request("c", [1], max_tokens=2))) == 3


async def test_a_load_that_ends_while_it_is_freed_leaves_nothing(engine, tiny_models):
    loading = asyncio.create_task(engine.load(options(tiny_models("llama"))))
    await asyncio.sleep(0)
    # Free comes in the very tick in which the load has ended and its caller does not know yet.
    while not engine.load_task.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await engine.free()
    await loading
    assert engine.model is None
    await engine.load(options(tiny_models("llama")))
    assert len(await collect(engine, make_request("c", [1], max_tokens=2))) == 3


async def test_who_has_the_last_event_finds_the_request_in_the_snapshot_no_more(
    engine, tiny_models
):
    await engine.load(options(tiny_models("llama")))
    running = asyncio.create_task(collect(engine, endless_request("z")))
    await until(lambda: engine.status().state is EngineState.BUSY)
    generated = 0
    for i in range(40):
        await collect(engine, make_request(f"r{i}", prompt_of(5, i), max_tokens=1 + i % 7))
        generated += 1 + i % 7
        status = engine.status()
        assert f"r{i}" not in [request.request_id for request in status.requests]
        assert status.metrics["generated_tokens"] >= generated
        assert status.state is EngineState.BUSY
    await engine.free()
    with pytest.raises(RequestCancelledError):
        await running


async def test_a_lone_request_leaves_a_ready_engine_whatever_ends_it(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    prompt = prompt_of(5)
    *_, last = await collect(engine, make_request("a", prompt, max_tokens=2))
    assert engine.status().state is EngineState.READY
    await collect(engine, make_request("b", prompt, max_tokens=9, stop=[last.token_id]))
    assert engine.status().state is EngineState.READY
    assert engine.status().metrics["prompt_cache.looked_up_tokens"] == 2 * len(prompt)


async def test_too_many_requests_are_refused_at_once(engine, tiny_models):
    await engine.load(options(tiny_models("llama"), max_slots=1, max_waiting=1))
    for name in ("a", "b"):
        engine.submit(engine.model, endless_request(name))
    with pytest.raises(OverloadedError, match="max_waiting 1"):
        engine.submit(engine.model, make_request("c", prompt_of(5)))
    engine.cancel("a")
    engine.submit(engine.model, make_request("c", prompt_of(5)))


async def test_an_id_that_is_running_is_refused(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    engine.submit(engine.model, endless_request("a"))
    with pytest.raises(InvalidRequestError, match="CorrelationId"):
        engine.submit(engine.model, make_request("a", prompt_of(5)))


async def test_closing_lets_running_requests_finish(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    request = make_request("a", prompt_of(5), max_tokens=60)
    stream = engine.submit(engine.model, request)
    closing = asyncio.create_task(engine.close(drain_timeout_s=30.0))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError):
        engine.submit(engine.model, make_request("b", [1]))
    events = [event async for steps in stream for event in events_of(steps)]
    engine.cancel("a")
    await closing
    assert events[-1].finish_reason is FinishReason.LENGTH


async def test_closing_waits_for_a_request_that_is_being_prepared(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    with engine.preparation("a"):
        closing = asyncio.create_task(engine.close(drain_timeout_s=30.0))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            engine.preparation("b")
        stream = engine.submit(engine.model, make_request("a", prompt_of(5), max_tokens=3))
    events = [event async for steps in stream for event in events_of(steps)]
    engine.cancel("a")
    await closing
    assert events[-1].finish_reason is FinishReason.LENGTH


async def test_a_preparation_that_fails_holds_nobody_up(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    with pytest.raises(ZeroDivisionError), engine.preparation("a"):
        raise ZeroDivisionError
    await asyncio.wait_for(engine.close(drain_timeout_s=3600.0), 60.0)


async def test_closing_ends_what_does_not_finish_in_time(engine, tiny_models):
    await engine.load(options(tiny_models("llama")))
    running = asyncio.create_task(collect(engine, endless_request("a")))
    await asyncio.sleep(0)
    await engine.close(drain_timeout_s=0.0)
    with pytest.raises(ShuttingDownError):
        await running


def test_a_process_that_generated_exits_cleanly(tiny_models, tmp_path):
    """Neither the server nor its engine aborts."""
    code = (
        "import asyncio, sys\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from backend.model.checkpoint.upstream import index_transformers\n"
        "index_transformers(Path(sys.argv.pop()))\n"
        "from engine_driver import VOCAB, make_request\n"
        "from backend.config import ModelOptions\n"
        "from backend.engine.engine import Engine\n"
        "from backend.pipeline.served_model import ServedModel\n"
        "async def main():\n"
        "    engine = Engine(serve=ServedModel.of)\n"
        "    await engine.load(ModelOptions(model=sys.argv[1]))\n"
        "    request = make_request('a', [1, 2, 3])\n"
        "    async for _ in engine.submit(engine.model, request): pass\n"
        "    engine.cancel('a')\n"
        "    await engine.close(drain_timeout_s=1.0)\n"
        "asyncio.run(main())\n"
    )
    support = str(Path(__file__).parent.parent / "support")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_models("llama")), support, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
