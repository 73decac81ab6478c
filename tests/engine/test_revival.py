"""What the facade does when its thread dies, with workers that die as they are told."""

import asyncio
import queue
import time
from types import SimpleNamespace

import pytest
from engine_driver import make_request
from serving import until

from backend.config import ModelOptions
from backend.core.embedding import EmbeddingRequest, Pooling
from backend.core.status import EngineState, EngineStatus
from backend.engine.command import Load, Stop
from backend.engine.engine import Engine
from backend.errors import EngineFailedError, LoadFailedError, ModelNotLoadedError

OPTIONS = ModelOptions(model="org/tiny")
WORKS, FAILS, HANGS, KILLS = "works", "fails", "hangs", "kills"


class FragileWorker:
    """Loads as it is told, one word per load; dies of anything else."""

    def __init__(self, commands, loads):
        self._commands = commands
        self._loads = loads
        self.status = EngineStatus(state=EngineState.READY)
        self.turn_s = 0.0

    def run(self):
        while not isinstance(command := self._commands.get(), Stop):
            outcome = self._loads.get() if isinstance(command, Load) else KILLS
            if outcome == KILLS:
                raise MemoryError(type(command).__name__)
            if outcome == HANGS:
                while not command.reply.cancelled():
                    time.sleep(0.001)
            elif outcome == FAILS:
                command.reply.set_exception(LoadFailedError("the file is gone"))
            else:
                command.reply.set_result(SimpleNamespace(card=SimpleNamespace(name="tiny")))


def engine_with(*outcomes, make=FragileWorker):
    loads = queue.SimpleQueue()
    for outcome in outcomes:
        loads.put(outcome)

    async def locate(_options):
        return None

    return Engine(locate=locate, make_worker=lambda commands, _publish: make(commands, loads))


async def generate(engine, name="a"):
    try:
        return [events async for events in engine.submit(make_request(name, [1]))]
    finally:
        engine.cancel(name)


async def embed(engine):
    return await engine.embed(
        EmbeddingRequest(token_ids=(1,), pooling=Pooling.MEAN, is_normalized=True)
    )


async def test_whoever_waits_is_told_what_the_thread_died_of():
    engine = engine_with(WORKS, WORKS)
    await engine.load(OPTIONS)
    calls = [generate(engine, "a"), generate(engine, "b"), embed(engine)]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineFailedError)
        assert str(result) == "the engine has failed: MemoryError: Submit"
    await engine.close(drain_timeout_s=0.0)


async def test_the_next_thread_loads_the_model_again(caplog):
    engine = engine_with(WORKS, WORKS, WORKS)
    await engine.load(OPTIONS)
    model = engine.model
    for _ in range(2):
        with pytest.raises(EngineFailedError):
            await generate(engine)
        await until(lambda: engine.status().state is EngineState.READY)
    assert (engine.fault, engine.model.card.name) == ("", "tiny")
    assert engine.model is model, "what is prepared for it is still right"
    assert caplog.text.count("the engine has started anew, with tiny") == 2
    await engine.close(drain_timeout_s=0.0)


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [(FAILS, "the file is gone"), (KILLS, "the engine has failed: MemoryError: Load")],
)
async def test_an_engine_that_cannot_start_anew_says_so_until_a_load_works(outcome, fault):
    engine = engine_with(WORKS, outcome, WORKS)
    told = []
    engine.on_fault(lambda: told.append(engine.fault))
    await engine.load(OPTIONS)
    with pytest.raises(EngineFailedError):
        await generate(engine)
    await until(lambda: engine.fault == fault)
    assert engine.status().state is EngineState.ERROR
    with pytest.raises(ModelNotLoadedError):
        engine.submit(make_request("b", [1]))
    await engine.load(OPTIONS)
    assert (engine.fault, engine.status().state) == ("", EngineState.READY)
    assert told == [fault, ""]
    await engine.close(drain_timeout_s=0.0)


async def test_a_load_that_kills_the_thread_fails_and_the_next_one_works():
    engine = engine_with(KILLS, WORKS)
    with pytest.raises(EngineFailedError, match="MemoryError: Load"):
        await engine.load(OPTIONS)
    assert (engine.fault, engine.status().state) == ("", EngineState.ERROR)
    assert (await engine.load(OPTIONS)).name == "tiny"
    await engine.close(drain_timeout_s=0.0)


async def test_freeing_what_dies_of_it_leaves_nothing():
    engine = engine_with(WORKS, WORKS)
    await engine.load(OPTIONS)
    await engine.free()
    assert (engine.model, engine.fault) == (None, "")
    assert engine.status().state is EngineState.UNINITIALIZED
    await engine.close(drain_timeout_s=0.0)


async def test_free_ends_a_revival():
    engine = engine_with(WORKS, HANGS)
    await engine.load(OPTIONS)
    with pytest.raises(EngineFailedError):
        await generate(engine)
    assert engine.status().state is EngineState.BUSY
    await engine.free()
    assert (engine.model, engine.fault) == (None, "")
    await engine.close(drain_timeout_s=0.0)


async def test_without_mlx_a_load_fails_and_says_why():
    def no_worker(_commands, _loads):
        raise LoadFailedError("MLX cannot be imported: no such library")

    engine = engine_with(make=no_worker)
    with pytest.raises(LoadFailedError, match="no such library"):
        await engine.load(OPTIONS)
    assert engine.fault == ""
