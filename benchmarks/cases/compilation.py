"""How long does it take to prepare a vocabulary and grammars?

`python -m benchmarks.cases.compilation` reads a JSON object: a model's directory, and the number of
runs. It answers with the milliseconds of each run, by task.
"""

import json
import queue
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from backend.config import ModelOptions
from backend.core.guide import Guide, ReplyRule
from backend.engine.grammars.pool import GrammarPool, GrammarWorkshop
from backend.errors import BackendError
from backend.model.loader import load
from backend.pipeline.generate import render
from backend.pipeline.served_model import ServedModel
from backend.rpc.parsing.generation_fields import generation_call
from benchmarks.cases.demands import Demand, Reply, request


def measure(directory: str, runs: int) -> dict[str, list[float]]:
    """Return the times of the vocabulary, and of a first grammar of each kind."""
    options = ModelOptions(model=directory)
    model = ServedModel.of(load(options, Path(directory)), options)
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        workshop = GrammarWorkshop(model.tokenizer, model.card)
        took["vocabulary ready"].append(_ms(lambda workshop=workshop: workshop.compiler))
        pool = GrammarPool(workshop, lambda _requests: None)
        pool.start()
        _make(pool, Guide(rule=ReplyRule(text='root ::= "a"')))
        for demand in Demand:
            asked = request("Hello", Reply(variant=0, new_tokens=1, seed=1), demand)
            call = generation_call(asked, options)
            guide = model.constraints.guide(call, render(call, model))
            took[f"{demand} made"].append(_ms(partial(_make, pool, guide)))
    return took


def _make(pool: GrammarPool, guide: Guide) -> None:
    made: queue.SimpleQueue[object] = queue.SimpleQueue()
    pool.submit("request", guide, made.put)
    if isinstance(error := made.get(), BackendError):
        raise error


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000.0


def main() -> None:
    """Answer one question from standard input."""
    json.dump(measure(**json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
