"""The empty caches of sequences, quantised if requested and supported."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from backend.cache.kv import RowKV, group_size_for
from backend.cache.layers import UpstreamCache, cache_leaves, class_of, with_leaves
from backend.config import DEFAULT_TUNING, TuningOptions
from backend.engine.kv.layer import install
from backend.engine.passes.agreement import ALONE, Ranks
from backend.engine.plan import MODEL_ERRORS, BatchPlan, Caches, Decoder
from backend.model.checkpoint.failures import one_line

_TRIAL_PROMPT = tuple(range(8))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheFactory:
    """Creates the caches of one sequence: the network's own, or quantised ones.

    Attributes:
        group_sizes: Values that share a scale, for each leaf of the caches in order; `None`
            leaves it as it is. An empty tuple leaves all as they are.
    """

    network: Decoder
    bits: int = 8
    group_sizes: tuple[int | None, ...] = ()
    plan: BatchPlan = field(default_factory=BatchPlan)

    def __call__(self) -> Caches:
        """Return fresh caches."""
        caches: Caches = make_prompt_cache(self.network)
        install()
        if self.plan.shares_prefixes:
            return [with_leaves(_referring, cache) for cache in caches]
        if not self.group_sizes:
            return caches
        quantised = partial(self._quantised, iter(self.group_sizes))
        return [with_leaves(quantised, cache) for cache in caches]

    def _quantised(self, sizes: Iterator[int | None], leaf: UpstreamCache) -> UpstreamCache:
        size = next(sizes)
        return leaf if size is None else leaf.to_quantized(group_size=size, bits=self.bits)


def _referring(leaf: UpstreamCache) -> UpstreamCache:
    """Return a cache that can use the prompt cache in place, if one can take the place of this."""
    return RowKV() if class_of(leaf).refers else leaf


def make_cache_factory(
    network: Decoder,
    tuning: TuningOptions,
    ranks: Ranks = ALONE,
    known: tuple[int | None, ...] | None = None,
) -> CacheFactory:
    """Return the factory that the options request, after trying it on a few tokens.

    A network that does not support quantised caches keeps its own, with a warning.

    Args:
        ranks: The ranks of the model: either all of them quantise or none.
        known: The group sizes that an earlier load found; `None` finds them.
    """
    own = CacheFactory(network)
    if tuning.memory.kv_bits is None:
        return own
    if known is not None:
        return CacheFactory(network, tuning.memory.kv_bits, known) if known else own
    used = own()
    _computed(ranks, network, _TRIAL_PROMPT, used)
    sizes = _group_sizes(used, tuning.memory.kv_group_size)
    quantised = CacheFactory(network, tuning.memory.kv_bits, sizes)
    if fault := _fault(quantised, ranks):
        log.warning("the KV cache of this model is not quantised: %s", fault)
        return own
    count = len(sizes) - sizes.count(None)
    log.info("KV cache: %d bits in %d of %d layers", tuning.memory.kv_bits, count, len(sizes))
    return quantised


def try_device(network: Decoder) -> None:
    """Compute a trial prompt of one token; passes on the device's errors."""
    mx.eval(network(mx.array([[0]]), cache=make_cache_factory(network, DEFAULT_TUNING)()))


def foreseen_cache_factory(network: Decoder, tuning: TuningOptions) -> CacheFactory:
    """Return the expected result of `make_cache_factory`; computes nothing."""
    own = CacheFactory(network)
    if tuning.memory.kv_bits is None:
        return own
    used = own()
    network(mx.array([_TRIAL_PROMPT]), cache=used)
    sizes = _group_sizes(used, tuning.memory.kv_group_size)
    return CacheFactory(network, tuning.memory.kv_bits, sizes) if any(sizes) else own


def _group_sizes(used: Caches, largest: int) -> tuple[int | None, ...]:
    """Return a group size for every leaf with keys and values of all positions.

    Heads may differ in width between layers, which only used caches show.
    """
    return tuple(
        group_size_for((leaf.keys.shape[-1], leaf.values.shape[-1]), largest)
        if class_of(leaf).quantises(leaf) and not leaf.empty()
        else None
        for leaf in cache_leaves(used)
    )


def _fault(fresh_caches: CacheFactory, ranks: Ranks) -> str | None:
    """Return the reason why these caches cannot be used, or `None`."""
    if not ranks.any(any(fresh_caches.group_sizes)):
        return "no layer has keys and values whose heads are a multiple of 32 wide"
    caches = fresh_caches()
    try:
        _computed(ranks, fresh_caches.network, _TRIAL_PROMPT, caches)
        logits = _computed(ranks, fresh_caches.network, _TRIAL_PROMPT[:1], caches)
    except MODEL_ERRORS as error:
        return f"its attention raises {type(error).__name__}: {one_line(error)}"
    is_finite = mx.isfinite(logits).all().item()
    return ranks.fault(None if is_finite else "its logits are not finite")


def _computed(ranks: Ranks, network: Decoder, tokens: tuple[int, ...], caches: Caches) -> mx.array:
    logits = ranks.attempt(lambda: network(mx.array([tokens]), cache=caches))
    mx.eval(logits, [cache.state for cache in caches])
    return logits
