"""Matches fixed texts and tags at a position of a text that is still growing.

A match has three possible outcomes: it ends at a position, it is refuted, or more text is
needed. The lengths of tags and of whitespace between them are limited, so nothing stays
undecided for long.
"""

import re

REFUTED = -1
UNDECIDED = -2

MAX_SPACE_CHARS = 64

_NOT_SPACE = re.compile(r"\S")


def after(text: str, position: int, expected: str) -> int:
    """Return the position after an expected text."""
    if text.startswith(expected, position):
        return position + len(expected)
    rest = text[position : position + len(expected)]
    is_open = position + len(rest) == len(text) and expected.startswith(rest)
    return UNDECIDED if is_open else REFUTED


def span_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return the end of a match; the pattern must be able to match empty text."""
    match = pattern.match(text, position)
    return match.end() if match else position


def after_space(text: str, position: int) -> int:
    """Return the position of the next non-whitespace character."""
    found = _NOT_SPACE.search(text, position, position + MAX_SPACE_CHARS)
    if found:
        return found.start()
    return UNDECIDED if len(text) < position + MAX_SPACE_CHARS else REFUTED


def either(*answers: int) -> int:
    """Return the first match; without one, refuted only if all answers are."""
    best = max(answers)
    return best if best >= 0 else min(answers)
