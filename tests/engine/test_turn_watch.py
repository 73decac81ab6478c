"""What is told of a turn of the engine that does not end."""

from types import SimpleNamespace

import pytest
from engine_driver import make_request, prompt_of
from serving import until

from backend.config import ModelOptions
from backend.core.status import EngineState, EngineStatus
from backend.engine.command import Load, Stop
from backend.engine.engine import Engine

OPTIONS = ModelOptions(model="org/tiny")


class SlowWorker:
    """Loads at once, then is in one turn for as long as `turn_s` says."""

    def __init__(self, commands):
        self._commands = commands
        self.status = EngineStatus(state=EngineState.BUSY, generated_tokens=7)
        self.turn_s = 0.0

    def run(self):
        while not isinstance(command := self._commands.get(), Stop):
            if isinstance(command, Load):
                command.reply.set_result(SimpleNamespace(card=SimpleNamespace(name="tiny")))


async def test_a_turn_that_does_not_end_is_told_until_it_does(caplog):
    workers = []

    async def locate(_options):
        return None

    def make_worker(commands, _publish):
        workers.append(SlowWorker(commands))
        return workers[0]

    engine = Engine(locate=locate, make_worker=make_worker, long_turn_s=0.04)
    await engine.load(OPTIONS)
    workers[0].turn_s = 5.0
    await until(lambda: "in one turn for 5 s" in caplog.text)
    assert engine.status().state is EngineState.ERROR
    assert (engine.status().turn_s, engine.status().generated_tokens) == (5.0, 7)
    # It may get on yet: what comes meanwhile waits.
    engine.submit(make_request("a", [1]))
    engine.cancel("a")
    workers[0].turn_s = 12.0
    await until(lambda: "in one turn for 12 s" in caplog.text)
    workers[0].turn_s = 0.0
    assert engine.status().state is EngineState.BUSY
    await until(lambda: "goes on" in caplog.text)
    told = [record.message for record in caplog.records if "turn" in record.message]
    assert told == [
        "the engine has been in one turn for 5 s: it may be stuck",
        "the engine has been in one turn for 12 s: it may be stuck",
        "the engine goes on, after more than 12 s in one turn",
    ]
    await engine.close(drain_timeout_s=0.0)


@pytest.mark.mlx
async def test_the_snapshot_tells_how_long_the_present_turn_has_taken(tiny_models):
    engine = Engine()
    await engine.load(ModelOptions(model=str(tiny_models("llama"))))
    assert engine.status().turn_s == 0.0
    engine.submit(make_request("a", prompt_of(5), max_tokens=3000))
    await until(lambda: engine.status().turn_s > 0.0)
    engine.cancel("a")
    await until(lambda: engine.status().state is EngineState.READY)
    await until(lambda: engine.status().turn_s == 0.0)
    await engine.close(drain_timeout_s=0.0)
