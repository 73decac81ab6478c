"""How long do a vocabulary and grammars take to be ready?

`python -m benchmarks.compilation` reads a JSON object: a model's directory, and how often to
begin anew. It answers with the milliseconds of every time, by what took them.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from backend.config import ModelOptions, TuningOptions
from backend.generation import render
from backend.model.loader import load
from backend.output.detection import detect
from backend.output.evidence import FormatEvidence
from backend.rpc.requests import generation_call
from backend.structure import Structures
from benchmarks.demands import Demand, Reply, request


def measure(directory: str, runs: int) -> dict[str, list[float]]:
    """Return how long the vocabulary took, and then a first grammar of each kind."""
    model = load(ModelOptions(model=directory), Path(directory), cancelled=lambda: False)
    wire = detect(FormatEvidence(model.tokenizer.vocabulary, model.template.text))
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        structures = Structures(model.tokenizer, model.card)
        took["vocabulary ready"].append(_ms(structures.prepare))
        for demand in Demand:
            asked = request("Hello", Reply(variant=0, new_tokens=1, seed=1), demand)
            call = generation_call(asked, TuningOptions())
            make = partial(structures.grammar, call, render(call, model), wire)
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
