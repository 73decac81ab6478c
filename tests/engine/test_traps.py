"""Traps of mlx and mlx-lm 0.32 that the engine walks around, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mlx

SUPPORT = Path(__file__).parent.parent / "support"
PROLOGUE = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from engine_driver import make_request
from engine_events import events_of
from backend.config import ModelOptions
from backend.core.request import SamplingParams
from backend.engine.engine import Engine
from backend.pipeline.served_model import ServedModel

async def generate(engine, **sampling):
    request = make_request("a", [1, 2, 3], sampling=SamplingParams(**sampling))
    stream = engine.submit(engine.model, request)
    events = [event async for steps in stream for event in events_of(steps)]
    engine.cancel("a")
    return events
"""


def run(code: str, directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code, str(directory)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wired_limit_is_left_alone(tiny_models):
    """Raising it panics macOS kernels; mlx-lm's own generators do."""
    code = """
import mlx.core as mx
def refuse(limit):
    raise AssertionError("the wired limit was set")
mx.set_wired_limit = refuse

async def main():
    engine = Engine(serve=ServedModel.of)
    await engine.load(ModelOptions(model=sys.argv[1]))
    print(len(await generate(engine, temperature=0.7)))
    await engine.close(drain_timeout_s=1.0)
asyncio.run(main())
"""
    assert int(run(code, tiny_models("llama"))) == 13


def test_a_new_temperature_compiles_nothing(tiny_models, tmp_path):
    """On a CPU mlx builds a kernel, for half a second, per constant of a compiled function."""
    code = """
def kernels():
    import os
    return sorted(Path(os.environ["TMPDIR"]).rglob("*.so"))

async def main():
    engine = Engine(serve=ServedModel.of)
    await engine.load(ModelOptions(model=sys.argv[1]))
    await generate(engine)
    before = kernels()
    for i in range(3):
        await generate(engine, temperature=0.5 + i / 7, top_p=0.9 - i / 9, min_p=0.01 + i / 99)
    print(len(before), len(kernels()))
    await engine.close(drain_timeout_s=1.0)
asyncio.run(main())
"""
    before, after = map(int, run(code, tiny_models("llama"), TMPDIR=str(tmp_path)).split())
    # Models compile their own activations, where there is a compiler.
    assert before == after
