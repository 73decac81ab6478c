"""The result of a measurement."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """The extent of a measurement.

    Attributes:
        runs: Samples per figure; their median counts.
        is_quick: Whether to use only small models and short prompts.
        directories: Models to measure instead, where a case takes any.
    """

    runs: int
    is_quick: bool
    directories: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The project's own target."""

    bound: float
    is_minimum: bool

    def is_met(self, value: float) -> bool:
        """Tell whether a value lies on the right side."""
        return value >= self.bound if self.is_minimum else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.is_minimum else '≤'} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the report.

    Attributes:
        unit: `x` for a ratio.
        samples: One value per run, in order.
        context: The underlying quantities, by name, also medians.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    target: Target | None = None
    context: Mapping[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The value that counts."""
        return statistics.median(self.samples)

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; `None` when there is none."""
        return None if self.target is None else self.target.is_met(self.median)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "samples": self.samples,
            "target": None if self.target is None else str(self.target),
            "is_met": self.is_met,
            "context": dict(self.context),
        }


def at_least(bound: float) -> Target:
    """Return the target of a value that should be high."""
    return Target(bound, is_minimum=True)


def at_most(bound: float) -> Target:
    """Return the target of a value that should be low."""
    return Target(bound, is_minimum=False)
