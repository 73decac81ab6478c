"""The names of offered tools in a damaged text."""

import re
from typing import Protocol

from backend.output.readers.values.schema import ParameterTypes

_LABEL = re.compile(r"\w[\w:.-]*")


class Names(Protocol):
    """Tells which tools were offered."""

    def is_offered(self, name: str) -> bool:
        """Tell whether a name is valid for a call."""

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the argument types of a tool."""


def offered_name(word: str, names: Names) -> str:
    """Return the offered name in a word, which may have a namespace and a number."""
    parts = re.split("[.:]", word)
    candidates = (word, word.partition(".")[2], word.partition(":")[2], *parts)
    return next(filter(names.is_offered, candidates), "")


def last_name(text: str, names: Names) -> str:
    """Return the last offered name in a text."""
    words = reversed(_LABEL.findall(text))
    return next(filter(None, (offered_name(word, names) for word in words)), "")
