"""Steps of rows of different length, ours and mlx-lm's: `python -m benchmarks.cases.ragged_steps`.

Reads a JSON object: a model's directory, the side, and for each mix the positions that all rows
share and those that each has of its own. It answers with the milliseconds of a step and the bytes
of the caches, per mix. Our side is prepared for the device as an engine is. The rows hold random
keys and values, which take attention as long as those of a text.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from backend.cache.kv import MAX_NODE_TOKENS, Part, RowKV
from backend.core.prompt import Prompt
from backend.core.request import GenerationParams, GenerationRequest
from backend.cpu.install import install
from backend.engine.findings import Page
from backend.engine.passes.batch import Batch
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Caches, Decoder
from backend.engine.rows.row import Row
from backend.engine.trials.batch_check import BatchTrial, planning
from backend.engine.trials.trial_steps import at_once
from backend.model.device import DEVICE
from common import openblas
from common.process import usable_cores

OURS = "ours"
STEPS = 12
WARM_UP = 4
TOKEN = 7
# BatchGenerator pads every row to the longest: a mix that would take more is skipped.
MAX_PADDED_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Mix:
    """Rows that decode together.

    Attributes:
        shared: Positions of their common prefix.
        own: Positions of each row after it.
        is_apart: Whether each row has another prefix of this length, in the prompt cache as well.
    """

    shared: int
    own: Sequence[int]
    is_apart: bool = False

    @property
    def lengths(self) -> list[int]:
        """All positions of each row."""
        return [self.shared + own for own in self.own]


class Rows:
    """Creates rows of a length."""

    def __init__(self, network: Decoder) -> None:
        self._fresh = CacheFactory(network)
        self._probe = self._fresh()
        mx.eval(network(mx.array([[TOKEN]]), cache=self._probe))

    @property
    def bytes_per_token(self) -> int:
        """Size of a position in all layers."""
        return sum(a.nbytes // a.shape[2] for c in self._probe for a in (c.keys, c.values))

    def caches(self, tokens: int) -> Caches:
        """Return caches of one row."""
        caches = self._fresh()
        for cache, like in zip(caches, self._probe, strict=True):
            cache.keys, cache.values = _random(like, tokens)
            cache.offset = tokens
        mx.eval([cache.state for cache in caches])
        return caches

    def mixed(self, mix: Mix) -> list[Caches]:
        """Return caches of rows that use one prefix in place, in nodes of the prompt cache."""
        if not mix.shared:
            return [self.caches(tokens) for tokens in mix.own]
        if mix.is_apart:
            return [self._after(self._prefix(mix.shared), tokens) for tokens in mix.own]
        prefix = self._prefix(mix.shared)
        return [self._after(prefix, tokens) for tokens in mix.own]

    def _prefix(self, tokens: int) -> list[list[Part]]:
        starts = range(0, tokens, MAX_NODE_TOKENS)
        nodes = [min(MAX_NODE_TOKENS, tokens - start) for start in starts]
        prefix = [[Part(_random(like, n), n) for n in nodes] for like in self._probe]
        mx.eval([part.arrays for parts in prefix for part in parts])
        return prefix

    def _after(self, prefix: Sequence[Sequence[Part]], tokens: int) -> Caches:
        caches = [RowKV() for _ in prefix]
        for cache, parts, like in zip(caches, prefix, self._probe, strict=True):
            cache.parts = tuple(parts)
            cache.keys, cache.values = _random(like, tokens)
            cache.tail = tokens
        mx.eval([cache.state for cache in caches])
        return caches


class Ours:
    """The batch of the engine."""

    def __init__(self, network: Decoder, rows: Rows) -> None:
        self._network = network
        self._rows = rows
        vocabulary = network.args.vocab_size
        trial = BatchTrial(network, CacheFactory(network), range(vocabulary))
        plan = at_once(planning(trial, Page(), drafts=False))
        self._factory = CacheFactory(network, plan=plan)
        self._vocabulary = vocabulary

    def measure(self, mix: Mix) -> tuple[float, int]:
        """Return the milliseconds of a step, and the bytes of the caches."""
        batch = Batch(self._network, self._factory, self._vocabulary)
        rows = self._rows.mixed(mix)
        for number, (caches, tokens) in enumerate(zip(rows, mix.lengths, strict=True)):
            batch.add(_row(str(number), caches, tokens))
        step_ms = _median_ms(lambda: list(batch.step()))
        prefixes = len(mix.own) if mix.is_apart else 1
        stored = prefixes * mix.shared * self._rows.bytes_per_token
        return step_ms, batch.cache_bytes() + stored


class Upstream:
    """mlx-lm's `BatchGenerator`."""

    def __init__(self, network: Decoder, rows: Rows) -> None:
        self._network = network
        self._rows = rows

    def measure(self, mix: Mix) -> tuple[float, int] | None:
        """Return the same as `Ours`; `None` for a mix that takes too much memory."""
        lengths, count = mix.lengths, len(mix.own)
        if count * max(lengths) * self._rows.bytes_per_token > MAX_PADDED_BYTES:
            return None
        generator = BatchGenerator(
            self._network, completion_batch_size=count, prefill_batch_size=count
        )
        generator.insert(
            [[TOKEN]] * count,
            max_tokens=[2 * STEPS] * count,
            caches=[self._rows.caches(tokens) for tokens in lengths],
        )
        step_ms = _median_ms(generator.next_generated)
        nbytes = generator.prompt_cache_nbytes
        generator.close()
        return step_ms, nbytes


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    network, _ = load_model(Path(question["directory"]))
    is_ours = question["side"] == OURS
    _prepare(network, is_ours=is_ours)
    rows = Rows(network)
    measured = (Ours if is_ours else Upstream)(network, rows)
    answer: dict[str, Any] = {"bytes_per_token": rows.bytes_per_token, "mixes": {}}
    for name, mix in question["mixes"].items():
        answer["mixes"][name] = measured.measure(Mix(**mix))
        gc.collect()
        mx.clear_cache()
    json.dump(answer, sys.stdout)


def _prepare(network: Decoder, *, is_ours: bool) -> None:
    """Prepare a process; both sides have as many threads for products."""
    if is_ours:
        install()
        DEVICE.prepare(network, keeps_type=False)
    if openblas.has_openblas():
        openblas.set_threads(usable_cores())


def _median_ms(step: Callable[[], object]) -> float:
    times = list(_times_ms(step))
    return statistics.median(times[WARM_UP:])


def _times_ms(step: Callable[[], object]) -> Iterator[float]:
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        step()
        yield (time.perf_counter() - started) * 1000.0


def _row(name: str, caches: Caches, tokens: int) -> Row:
    request = GenerationRequest(
        params=GenerationParams(request_id=name),
        prompt=Prompt((TOKEN,) * (tokens + 1)),
        room=2 * STEPS,
    )
    row = Row(request)
    row.hold(caches)
    row.count_fed(tokens)
    return row


def _random(like: KVCache, tokens: int) -> tuple[mx.array, mx.array]:
    """Return keys and values of `tokens` positions."""
    keys, values = (
        mx.random.normal((1, a.shape[1], tokens, a.shape[3])).astype(a.dtype)
        for a in (like.keys, like.values)
    )
    return keys, values


if __name__ == "__main__":
    main()
