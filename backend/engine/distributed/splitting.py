"""The number of layers of each rank of a pipeline on unequal machines."""

import json
from collections.abc import Sequence

from backend.engine.distributed.messages import Form
from backend.engine.distributed.topology import Parallelism

# Machines that differ by less are treated alike.
_TOLERANCE = 0.1


def pipeline_split(form: Form, memory_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of every rank; none if an even split is as good.

    Args:
        form: The group and its model.
        memory_bytes: The memory of each rank.
    """
    if form.topology.parallelism is not Parallelism.PIPELINE:
        return ()
    if min(memory_bytes) >= (1.0 - _TOLERANCE) * max(memory_bytes):
        return ()
    config = json.loads((form.directory / "config.json").read_text(encoding="utf-8"))
    layers = config.get("text_config", config)["num_hidden_layers"]
    return shares(layers, memory_bytes)


def shares(layers: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers for each weight, in proportion and at least one.

    The layers left by rounding go to the largest remainders.
    """
    spare = layers - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    counts = [1 + int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: layers - sum(counts)]:
        counts[i] += 1
    return tuple(counts)
