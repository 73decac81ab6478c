"""Disarms callers' text that contains the placeholder of a medium."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.model.text.disarming import Disarmer

if TYPE_CHECKING:
    from collections.abc import Iterable

# An invisible character of zero width.
_WORD_JOINER = "\u2060"


class Placeholders(Disarmer):
    """The texts that represent media, or parts of them, in a model's prompts."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Compile the texts.

        Args:
            texts: Each part precedes the texts that contain it.
        """
        self._texts = tuple(dict.fromkeys(texts))

    def disarmed(self, text: str) -> str:
        """Return the text with every placeholder broken by an invisible character."""
        for placeholder in self._texts:
            text = text.replace(placeholder, placeholder[0] + _WORD_JOINER + placeholder[1:])
        return text
