"""Our prompt cache and mlx-lm's in one process: how fast do they restore a long prefix?

`python -m benchmarks.prompt_cache.stores` reads a JSON object: a model's directory, the tokens of
a prompt and the number of runs. It answers with the milliseconds of each
run, ours and theirs in turn.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache
from mlx_lm.utils import load_model

from backend.cache.kv import UNPACKED, Size
from backend.core.prompt import Prompt
from backend.core.request import GenerationParams, GenerationRequest
from backend.engine.plan import Caches, Decoder, FreshCaches
from backend.engine.prefix_store import DiskSettings, PrefixStore
from backend.engine.rows.row import Row

BUDGET = Size(2**40, math.inf)
MODEL_KEY = "model"


class Store(Protocol):
    """Keeps the caches of a prefix."""

    def insert(self, token_ids: Sequence[int], caches: Caches) -> None:
        """Store caches of these tokens, as after a prompt; the store takes ownership."""

    def fetch(self, prompt: Sequence[int]) -> Caches:
        """Return caches of all of a prompt but its last token, ready to decode."""


class OwnStore:
    """Our prompt cache, as rows use it."""

    def __init__(self, fresh_caches: FreshCaches) -> None:
        self._keeper = PrefixStore(fresh_caches, BUDGET, UNPACKED, DiskSettings())

    def insert(self, token_ids: Sequence[int], caches: Caches) -> None:
        """Store a row with this progress."""
        row = _row("inserted", token_ids)
        row.hold(caches)
        row.count_fed(len(token_ids))
        self._keeper.leave(row)

    def fetch(self, prompt: Sequence[int]) -> Caches:
        """Restore a new row; a single row decodes with these very caches."""
        row = _row("fetched", prompt)
        self._keeper.restore(row)
        self._keeper.leave(row)
        if row.cache is None or row.prefill_left:
            raise AssertionError("a stored prompt was not found")
        return row.cache


class UpstreamStore:
    """`LRUPromptCache` as `mlx_lm.server` uses it."""

    def __init__(self) -> None:
        self._store = LRUPromptCache()

    def insert(self, token_ids: Sequence[int], caches: Caches) -> None:
        """Insert an entry."""
        self._store.insert_cache(MODEL_KEY, list(token_ids), caches)

    def fetch(self, prompt: Sequence[int]) -> Caches:
        """Fetch a copy, which its generator turns into a batch of one."""
        caches, rest = self._store.fetch_nearest_cache(MODEL_KEY, list(prompt))
        if len(rest) != 1:
            raise AssertionError("a stored prompt was not found")
        return [cache.merge([cache]) for cache in caches]


def compare(directory: str, prompt_tokens: int, runs: int) -> dict[str, list[float]]:
    """Return the time of each fetch, in ms, until the next token can be written."""
    network, _ = load_model(Path(directory))

    def fresh_caches() -> Caches:
        caches: Caches = make_prompt_cache(network)
        return caches

    prompt = [n % 500 + n // 500 % 7 for n in range(prompt_tokens)]
    stores: dict[str, Store] = {"ours": OwnStore(fresh_caches), "theirs": UpstreamStore()}
    for store in stores.values():
        store.insert(prompt[:-1], _filled(network, fresh_caches(), prompt_tokens - 1))
    took: dict[str, list[float]] = {name: [] for name in stores}
    for run in range(runs + 1):
        for name, store in stores.items():
            started = time.perf_counter()
            _write_one(store.fetch(prompt))
            if run:  # the first one warms up
                took[name].append((time.perf_counter() - started) * 1000.0)
            mx.clear_cache()
    return took


def _row(name: str, token_ids: Sequence[int]) -> Row:
    request = GenerationRequest(
        params=GenerationParams(request_id=name), prompt=Prompt(tuple(token_ids)), room=1
    )
    return Row(request)


def _filled(network: Decoder, caches: Caches, tokens: int) -> Caches:
    """Fill caches as a prefill of `tokens` would; the values do not matter."""
    network(mx.array([[0]]), cache=caches)
    for cache in caches:
        if isinstance(cache, KVCache):
            cache.update_and_fetch(
                *(mx.random.normal(_shape(a, tokens - 1)) for a in (cache.keys, cache.values))
            )
    mx.eval([cache.state for cache in caches])
    return caches


def _write_one(caches: Caches) -> None:
    """Write one position, because copies are lazy; a state is replaced, not written to."""
    for cache in caches:
        if hasattr(cache, "update_and_fetch"):
            cache.update_and_fetch(*(mx.zeros(_shape(a, 1)) for a in (cache.keys, cache.values)))
    mx.eval([cache.state for cache in caches])


def _shape(array: mx.array, tokens: int) -> tuple[int, ...]:
    return (*array.shape[:-2], tokens, array.shape[-1])


def main() -> None:
    """Answer one question from standard input."""
    json.dump(compare(**json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
