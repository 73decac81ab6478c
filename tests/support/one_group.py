"""Load a model as options say and generate: in a test, or as a program on a host of its own."""

import asyncio
import json
import sys
from typing import Any

from engine_driver import make_request, prompt_of
from groups import take

from backend.config import ModelOptions, TuningOptions
from backend.core.request import SamplingParams
from backend.engine.engine import Engine
from backend.pipeline.served_model import ServedModel


async def tokens_of_one_group(directory: Any, tuning: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a few requests that run at once."""
    engine = Engine(serve=ServedModel.of)
    await engine.load(ModelOptions(model=str(directory), tuning=TuningOptions.of(**tuning)))
    warm = SamplingParams(temperature=1.0, seed=5)
    requests = [
        make_request("greedy", prompt_of(40)),
        make_request("warm", prompt_of(30, 1), sampling=warm),
    ]
    outcomes = await asyncio.gather(*(take(engine, request) for request in requests))
    await engine.close(drain_timeout_s=0.0)
    return [outcome.tokens for outcome in outcomes]


if __name__ == "__main__":
    found = asyncio.run(tokens_of_one_group(sys.argv[1], json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps(found) + "\n")
