"""Draws pieces of code, each with a request to rename one of its identifiers."""

import re
from random import Random
from typing import NamedTuple

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_LINES = (
    "{a} = {b}({c}, {n})",
    "{a}.{b} = {n}",
    "return {a}({b})",
    "if {a} > {n}: {b}({c})",
    "for {a} in {b}: {c}({n})",
    "print({a}, {b}[{n}])",
    "{a} += {b} * {n}",
)
_RENAMED = (("count", "total"), ("load", "read"), ("send", "post"), ("open", "start"))
# The renamed identifier occurs in about one of this many lines.
_RENAMED_EVERY = 4


class Edit(NamedTuple):
    """A piece of code, before and after a change.

    Attributes:
        question: Contains the code and asks for the change.
        answer: The code with the change.
    """

    question: str
    answer: str


def draw_edit(rng: Random, lines: int, *, is_known: bool = True) -> Edit:
    """Draw an edit of `lines` lines of code; the identifier occurs in at least one.

    Args:
        rng: Makes all choices.
        lines: At least one.
        is_known: Whether to rename one of a few known identifiers instead of any.
    """
    names = _identifiers(rng, 5 + lines // 2)
    old, new = rng.choice(_RENAMED) if is_known else (names.pop(), names.pop())
    names += [other for other, _ in _RENAMED if other != old]
    places = {rng.randrange(lines)} | {n for n in range(lines) if rng.randrange(_RENAMED_EVERY) < 1}
    code = "\n".join(_line(rng, names, old if n in places else "") for n in range(lines))
    question = f"Rename {old} to {new}:\n{code}"
    return Edit(question, re.sub(rf"\b{old}\b", new, code))


def _line(rng: Random, names: list[str], wanted: str) -> str:
    chosen = rng.sample(names, 3)
    if wanted:
        # Every line has the first two.
        chosen[rng.randrange(2)] = wanted
    a, b, c = chosen
    return rng.choice(_LINES).format(a=a, b=b, c=c, n=rng.randint(0, 99))


def _identifiers(rng: Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = (
            rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 3)))
        )
        found["".join(syllables)] = None
    return list(found)
