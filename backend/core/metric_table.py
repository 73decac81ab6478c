"""The numbers of the engine: a row each.

A row is all that a new number needs, besides the line that counts it: `Counts.add` for a counter,
the snapshot of its owner for a gauge. Prometheus, `Inspect`, the command line and the page show it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from backend.core.prefix_listing import HitKind

Number: TypeAlias = int | float
Values: TypeAlias = Mapping[str, Number]
"""Numbers by key: a row's name, with the value of its label after a dot."""


class MetricKind(Enum):
    """Whether a number goes on where that of a lost engine process ended, or is measured anew."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of the engine.

    Attributes:
        help: One line, for people.
        exported: Its name for Prometheus, after `mlx_backend_`; its own if empty.
        label: Name of the label that divides it; empty for none.
        words: Follow the number among the totals; empty if it is shown elsewhere, or not.
        share_of: The name of the number of which it is a part: its total is a percentage.
    """

    kind: MetricKind
    help: str
    exported: str = ""
    label: str = ""
    label_values: tuple[str, ...] = ()
    words: str = ""
    share_of: str = ""

    def keys(self, name: str) -> dict[str, str]:
        """Return the values of its label by key; one key without a label."""
        if not self.label:
            return {name: ""}
        return {f"{name}.{value}": value for value in self.label_values}


_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE

METRICS = {
    "slots_taken": Metric(kind=_GAUGE, help="Requests that prefill or decode"),
    "waiting": Metric(kind=_GAUGE, help="Requests and background work that wait"),
    "prompt_tokens": Metric(
        kind=_COUNTER,
        help="Prompt tokens prefilled, those from the prompt cache not counted",
        exported="prompt_tokens_processed",
        words="prompt tokens prefilled",
    ),
    "generated_tokens": Metric(
        kind=_COUNTER,
        help="Tokens generated",
        exported="tokens_generated",
        words="tokens generated",
    ),
    "tokens_per_s": Metric(
        kind=_GAUGE,
        help="Tokens generated per second",
        exported="tokens_per_second",
        words="tokens/s",
    ),
    "drafted_tokens": Metric(
        kind=_COUNTER, help="Tokens drafted ahead of the model", exported="tokens_drafted"
    ),
    "accepted_tokens": Metric(
        kind=_COUNTER,
        help="Drafted tokens that the model drew itself",
        exported="tokens_accepted",
        words="drafted tokens right",
        share_of="drafted_tokens",
    ),
    "media_encoded": Metric(
        kind=_COUNTER, help="Runs of a tower: a medium that is remembered takes none"
    ),
    "experts.used": Metric(
        kind=_COUNTER, help="Experts that passes needed, by layer, of a mixture on disk"
    ),
    "experts.hits": Metric(
        kind=_COUNTER,
        help="Experts on disk that were in memory when a pass needed them",
        words="experts found in memory",
        share_of="experts.used",
    ),
    "experts.misses": Metric(kind=_COUNTER, help="Experts that had to be read from disk"),
    "experts.read_bytes": Metric(kind=_COUNTER, help="Bytes of experts read from disk"),
    "experts.read_s": Metric(
        kind=_COUNTER,
        help="Seconds that passes waited for experts from disk",
        exported="experts_read_seconds",
    ),
    "experts.bytes": Metric(kind=_GAUGE, help="Bytes in memory of experts on disk"),
    "turn_s": Metric(
        kind=_GAUGE, help="Seconds in the engine's present turn", exported="turn_seconds"
    ),
    "restarts": Metric(
        kind=_COUNTER, help="Engine processes that were replaced", exported="engine_restarts"
    ),
    "lost_s": Metric(
        kind=_COUNTER, help="Seconds that their replacement took", exported="engine_lost_seconds"
    ),
    "prompt_cache.bytes": Metric(kind=_GAUGE, help="Bytes stored"),
    "prompt_cache.budget_bytes": Metric(kind=_GAUGE, help="Bytes at most"),
    "prompt_cache.arrays": Metric(kind=_GAUGE, help="Arrays stored"),
    "prompt_cache.nodes": Metric(kind=_GAUGE, help="Nodes of the radix tree"),
    "prompt_cache.tokens": Metric(kind=_GAUGE, help="Tokens stored, shared ones once"),
    "prompt_cache.looked_up_tokens": Metric(kind=_COUNTER, help="Prompt tokens of all requests"),
    "prompt_cache.hit_tokens": Metric(kind=_COUNTER, help="Prompt tokens taken from the cache"),
    "prompt_cache.hits": Metric(
        kind=_COUNTER,
        help="Requests by kind of hit",
        exported="prompt_cache_lookups",
        label="kind",
        label_values=tuple(kind.value for kind in HitKind),
    ),
    "prompt_cache.evictions": Metric(kind=_COUNTER, help="Nodes evicted"),
    "prompt_cache.recomputed_tokens": Metric(
        kind=_COUNTER, help="Prompt tokens computed again after they were evicted"
    ),
    "prompt_cache.stateless_tokens": Metric(
        kind=_COUNTER, help="Prompt tokens stored, but without a state or window to go on from"
    ),
    "prompt_cache.disk.bytes": Metric(kind=_GAUGE, help="Bytes of all models' files"),
    "prompt_cache.disk.files": Metric(kind=_GAUGE, help="Files of this model"),
    "prompt_cache.disk.read_tokens": Metric(kind=_COUNTER, help="Tokens whose KV was read back"),
    "prompt_cache.disk.written_bytes": Metric(
        kind=_COUNTER, help="Bytes of keys, values and states written"
    ),
    "prompt_cache.disk.damaged": Metric(kind=_COUNTER, help="Files set aside as damaged"),
    "prompt_cache.disk.dropped": Metric(
        kind=_COUNTER, help="Nodes not written, too many were waiting"
    ),
}
"""All numbers by name, in the order in which they are shown; dots are the messages of `Inspect`."""


class Counts:
    """The counts of one part of the engine; belongs to one thread.

    Attributes:
        values: By key; all keys, from 0 on.
    """

    def __init__(self) -> None:
        self.values = zeros()

    def add(self, key: str, amount: Number = 1) -> None:
        """Count; the key must be that of a row."""
        self.values[key] += amount


def zeros() -> dict[str, Number]:
    """Return all keys with 0."""
    return {key: 0 for name, metric in METRICS.items() for key in metric.keys(name)}


def counters_of(values: Values) -> dict[str, Number]:
    """Return the values of counters only."""
    counters = ((name, m) for name, m in METRICS.items() if m.kind is MetricKind.COUNTER)
    return {key: values.get(key, 0) for name, metric in counters for key in metric.keys(name)}


def added(parts: Iterable[Values]) -> dict[str, Number]:
    """Return the sums of several parts' values."""
    total = zeros()
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def nested(values: Values) -> dict[str, Any]:
    """Return values in dictionaries as deep as their keys have dots; labels only if counted."""
    tree: dict[str, Any] = {}
    for name, metric in METRICS.items():
        for key, label in metric.keys(name).items():
            *outer, last = key.split(".")
            place = tree
            for word in outer:
                place = place.setdefault(word, {})
            if values.get(key, 0) or not label:
                place[last] = values.get(key, 0)
    return tree


def totals(values: Values) -> Iterator[str]:
    """Yield the numbers that are shown among the totals, with their words."""
    for name, metric in METRICS.items():
        value, whole = values.get(name, 0), values.get(metric.share_of, 0)
        if metric.words and not metric.share_of:
            number = f"{value:,.1f}" if metric.kind is MetricKind.GAUGE else f"{value:,.0f}"
            yield f"{number} {metric.words}"
        elif metric.words and whole:
            yield f"{value / whole:.0%} of {whole:,.0f} {metric.words}"
