"""How long does it take to prepare a vocabulary and grammars?

`python -m benchmarks.cases.compilation` reads a JSON object: a model's directory, and the number of
runs. It answers with the milliseconds of each run, by task.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from backend.config import ModelOptions
from backend.model.loader import load
from backend.pipeline.constraints import Constraints
from backend.pipeline.generate import render
from backend.pipeline.served_model import ServedModel
from backend.rpc.parsing.requests import generation_call
from benchmarks.cases.demands import Demand, Reply, request


def measure(directory: str, runs: int) -> dict[str, list[float]]:
    """Return the times of the vocabulary, and of a first grammar of each kind."""
    options = ModelOptions(model=directory)
    model = ServedModel.of(load(options, Path(directory)), options)
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        constraints = Constraints(model.tokenizer, model.card, model.format)
        took["vocabulary ready"].append(_ms(constraints.prepare))
        for demand in Demand:
            asked = request("Hello", Reply(variant=0, new_tokens=1, seed=1), demand)
            call = generation_call(asked, options)
            make = partial(constraints.grammar, call, render(call, model))
            took[f"{demand} compiled"].append(_ms(make))
    return took


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000.0


def main() -> None:
    """Answer one question from standard input."""
    json.dump(measure(**json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
