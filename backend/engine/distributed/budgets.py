"""The budgets that all ranks agree on, so that they admit and evict the same."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from backend.cache.layers import cache_leaves
from backend.config import DEFAULT_TUNING, ModelOptions
from backend.engine.assembly import assemble_loop, prompt_cache_bytes
from backend.engine.distributed.linking import exchange
from backend.engine.distributed.messages import Form, Ready, Start
from backend.engine.findings import Notebook
from backend.engine.loop import EngineLoop
from backend.engine.passes.caches import make_cache_factory
from backend.engine.passes.ranks import Ranks
from backend.engine.port import Port
from backend.engine.rows.memory_budget import kv_budget_bytes, working_set_bytes
from backend.model.loaded import RunnableModel

# More than any memory, and small enough to be multiplied.
_PLENTY = 2**50


def assemble_shared_loop(
    model: RunnableModel, options: ModelOptions, start: Start, port: Port
) -> EngineLoop:
    """Return the idle loop of one rank of several, which all admit and evict the same.

    Args:
        model: This rank's shard.
        options: The options of the LoadModel.
        start: The budgets that the ranks agreed on.
        port: Of this rank.
    """
    layers = len(make_cache_factory(model.network, DEFAULT_TUNING)())
    tuning = options.tuning.updated(
        max_kv_bytes=start.kv_bytes_per_layer * layers,
        max_cache_bytes=start.cache_bytes_per_layer * layers,
        # Ranks read and write at their own speed: a disk would make them diverge.
        cache_dir=None,
        # They also measure the gain of a draft at their own speed.
        speculation="off",
    )
    agreed = replace(options, tuning=tuning, models_dir=None)
    # All must make the same trials: what one of them remembers, another may not.
    return assemble_loop(model, agreed, port, Notebook(), ranks=Ranks(exchange))


def readiness(model: RunnableModel, form: Form, rank: int) -> Ready:
    """Return the values that ranks must agree on before they start."""
    tuning = form.options.tuning
    caches = make_cache_factory(model.network, tuning, Ranks(exchange))()
    # Ranks of one machine share its memory, unless each has a GPU.
    sharing = 1 if mx.cuda.is_available() else form.topology.neighbours(rank)
    weights_bytes = model.card.weights_bytes * sharing
    kv_bytes = kv_budget_bytes(form.options, weights_bytes, working_set_bytes())
    if tuning.memory.max_kv_bytes is None:
        kv_bytes //= sharing
    return Ready(
        layers=len(caches),
        cache_kinds=tuple(sorted(_kind(leaf) for leaf in cache_leaves(caches))),
        kv_budget_bytes=kv_bytes,
        cache_budget_bytes=prompt_cache_bytes(tuning, kv_bytes),
    )


def agreement(everyone: Sequence[Ready]) -> Start:
    """Return budgets with which every rank admits and evicts the same.

    Ranks of a pipeline have different layers: with budgets per layer their accounts agree as
    long as all layers are of one kind. Otherwise no prefix is kept, and requests are not
    charged.
    """
    kinds = {kind for ready in everyone for kind in ready.cache_kinds}
    if len(kinds) > 1 and len({ready.cache_kinds for ready in everyone}) > 1:
        return Start(kv_bytes_per_layer=_PLENTY, cache_bytes_per_layer=0)
    return Start(
        kv_bytes_per_layer=min(ready.kv_budget_bytes // ready.layers for ready in everyone),
        cache_bytes_per_layer=min(ready.cache_budget_bytes // ready.layers for ready in everyone),
    )


def _kind(leaf: object) -> str:
    """Return a key that distinguishes caches by the tokens they keep and how they are cut."""
    return f"{type(leaf).__name__}:{getattr(leaf, 'max_size', '')}"
