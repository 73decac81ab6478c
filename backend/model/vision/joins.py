"""Families whose processors change the text around their media."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.model.vision.processor_call import HfProcessor

_FAKE = "<fake_token_around_image>"


@dataclass(frozen=True, slots=True)
class Join:
    """How media and the text between them are joined.

    Attributes:
        closing: The token after a medium, which is also the one before the next; "" if none is.
        rules: Patterns in a prompt with its media, and their replacements, in order.
    """

    closing: str = ""
    rules: Sequence[tuple[str, str]] = ()


# By processor class.
_JOINS: Mapping[str, Join] = {
    "Idefics2Processor": Join(_FAKE, ((_FAKE * 2, _FAKE), (rf"{_FAKE}(?=[^\s<])", f"{_FAKE} "))),
}


def join_of(processor: HfProcessor) -> Join:
    """Return how a processor joins media and text."""
    return _JOINS.get(type(processor).__name__, Join())


def joined(text: str, rules: Sequence[tuple[str, str]]) -> str:
    """Return a prompt with its media after the rules of a join."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
