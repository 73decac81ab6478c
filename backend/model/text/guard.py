"""Guards a prompt against control tokens in a caller's text, such as a quoted "<|im_end|>".

A guard, a number that no text has, is put inside the mark before the template is rendered. The
template carries it along; the tokenizer finds no added token there, and removes it.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from backend.core.prompt import JsonValue, Message, Tool
from backend.model.text.disarming import Disarmer

# Digits pass through any filter of a template, and through JSON.
GUARD = str(10**15 + secrets.randbelow(9 * 10**15))
# What the model wrote, or is told how to write: its marks of thoughts and calls mean something.
_OWN_ROLES = frozenset({"assistant", "system", "developer"})
_PREFIX_CHARS = 2


def unguarded(text: str) -> str:
    """Return a prompt's text as a reader sees it."""
    return text.replace(GUARD, "")


class Marks(Disarmer):
    """Texts that are control tokens, at least two characters each."""

    def __init__(
        self, texts: Iterable[str], normalized: Callable[[str], str] | None = None
    ) -> None:
        """Index the texts.

        Args:
            texts: The marks.
            normalized: The tokenizer's normaliser, if it looks for marks in its result.
        """
        self._texts = frozenset(texts)
        self._normalized = normalized
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:_PREFIX_CHARS], set()).add(len(text))
        self._lengths = {prefix: sorted(each) for prefix, each in lengths.items()}
        first = "".join(re.escape(letter) for letter in {text[0] for text in self._texts})
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def __bool__(self) -> bool:
        """Whether there is any mark."""
        return bool(self._texts)

    def disarmed(self, text: str) -> str:
        """Return a text with a guard in each of its marks."""
        places = self._places(text)
        if not places:
            # A mark in wide letters, say, is one after the normaliser: the guard is a hint.
            hides_mark = self._normalized and self._places(self._normalized(text))
            return text + GUARD if hides_mark else text
        ends = [*places, len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        return text[: places[0]] + "".join(GUARD + piece for piece in pieces)

    def _places(self, text: str) -> list[int]:
        """Return the places after the first letter of each mark; marks may overlap."""
        return [
            match.end()
            for match in self._first.finditer(text)
            if self._has_mark(text, match.start())
        ]

    def _has_mark(self, text: str, start: int) -> bool:
        lengths = self._lengths.get(text[start : start + _PREFIX_CHARS], ())
        return any(text[start : start + length] in self._texts for length in lengths)


class Guard:
    """Puts guards into the texts of a request."""

    def __init__(self, marks: Marks, own_marks: Marks) -> None:
        """Combine the marks.

        Args:
            marks: Of texts that are data: what users, tools and their definitions say.
            own_marks: Of texts of the assistant and the system, which may mark thoughts and calls.
        """
        self._marks = marks
        self._own_marks = own_marks

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose marks are text."""
        return [self._message(message) for message in messages] if self._marks else messages

    def tools(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """Return tools whose marks are text."""
        return [self._marks.disarmed_tool(tool) for tool in tools] if self._marks else tools

    def options(self, options: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        """Return variables for a template, whose marks are text."""
        return {name: self._marks.disarmed_json(value) for name, value in options.items()}

    def text(self, text: str) -> str:
        """Return a text whose marks are text."""
        return self._marks.disarmed(text)

    def _message(self, message: Message) -> Message:
        if message.role not in _OWN_ROLES:
            return self._marks.disarmed_message(message)
        rest = self._marks.disarmed_message(replace(message, content="", media=()))
        own = self._own_marks.disarmed_message(message)
        return replace(rest, content=own.content, media=own.media)


NO_GUARD = Guard(Marks(()), Marks(()))
