"""Workloads for both raw mlx-lm and the server, and their speeds."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import mean
from typing import Self

_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling of one row; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows to generate at the same time, each of exactly `new_tokens`."""

    prompts: tuple[str, ...]
    samplings: tuple[Sampling, ...]
    new_tokens: int

    def to_json(self) -> str:
        """Return the workload as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the workload of a line."""
        parts = json.loads(line)
        return cls(
            prompts=tuple(parts["prompts"]),
            samplings=tuple(Sampling(**sampling) for sampling in parts["samplings"]),
            new_tokens=parts["new_tokens"],
        )


@dataclass(slots=True)
class Timeline:
    """Arrival times of one row's tokens, in seconds, with the number of tokens so far.

    Attributes:
        text: The reply so far, if the client notes it.
    """

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    text: bytes = b""

    def mark(self, time: float, count: int) -> None:
        """Record that `count` tokens have arrived."""
        self.times.append(time)
        self.counts.append(count)

    def tokens_until(self, time: float) -> int:
        """Return the number of tokens that had arrived."""
        arrivals = bisect_right(self.times, time)
        return self.counts[arrivals - 1] if arrivals else 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of all rows together.

    Attributes:
        whole: From the request to the last token, prefill included.
        decode: While every row was generating; 0 if they never were at the same time.
        first_s: Seconds from the request to a row's first token, mean of all rows.
        last_first_s: The same of the row that waited longest.
    """

    whole: float
    decode: float
    first_s: float
    last_first_s: float


def speed(started: float, rows: Sequence[Timeline]) -> Speed:
    """Return the speed of rows that were requested at `started`."""
    finished = max(row.times[-1] for row in rows)
    tokens = sum(row.counts[-1] for row in rows)
    begin = max(row.times[0] for row in rows)
    end = min(row.times[-1] for row in rows)
    decoded = sum(row.tokens_until(end) - row.tokens_until(begin) for row in rows)
    return Speed(
        whole=tokens / (finished - started),
        decode=decoded / (end - begin) if end > begin else 0.0,
        first_s=mean(row.times[0] for row in rows) - started,
        last_first_s=begin - started,
    )


def words(count: int, seed: int) -> str:
    """Return invented words, the same for the same seed; each is at least one token."""
    rng = Random(seed)
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    return " ".join(rng.choice(syllables) + rng.choice(syllables) for _ in range(count))
