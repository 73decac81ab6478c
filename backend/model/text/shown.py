"""Finds the texts of a conversation that are missing in a rendered prompt."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from backend.core.prompt import JsonValue
from backend.model.text.turns import Turn

# Templates may drop what an assistant said: its thoughts, or a preamble of calls.
_KEPT_ROLES = frozenset({"system", "user", "tool"})
# A text normally begins this close behind the one before it; so many are searched for elsewhere.
_NEAR_CHARS = 4096
_MAX_FAR_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a conversation, without its outer white space.

    Attributes:
        place: The index of its turn.
        text: The text, not empty.
        may_be_dropped: Whether a prompt may lack it.
    """

    place: int
    text: str
    may_be_dropped: bool = False


def said(turns: Sequence[Turn]) -> list[Text]:
    """Return the texts of a conversation."""
    return [
        Text(place, text.strip(), turn["role"] not in _KEPT_ROLES)
        for place, turn in enumerate(turns)
        for text in _texts(turn["content"])
        if text.strip()
    ]


def missing(texts: Sequence[Text], prompt: str) -> list[Text]:
    """Return the texts that a prompt has to show and that are not in it, plain or as JSON.

    Its time is proportional to the prompt: only a limited number of texts is searched for in all of
    it, and the rest is taken to be there.
    """
    lost: list[Text] = []
    start, far = 0, 0
    for text in texts:
        end = _end_of(text.text, prompt, start, start + _NEAR_CHARS)
        if not end and far < _MAX_FAR_TEXTS:
            far += 1
            end = _end_of(text.text, prompt, start, len(prompt))
            if not (end or text.may_be_dropped or _end_of(text.text, prompt, 0, len(prompt))):
                lost.append(text)
        start = end or start
    return lost


def _end_of(text: str, prompt: str, start: int, stop: int) -> int:
    """Return the end of a text that begins between two places of a prompt, or 0."""
    for form in _forms(text):
        if (found := prompt.find(form, start, stop + len(form))) >= 0:
            return found + len(form)
    return 0


def with_stand_ins(form: Sequence[Turn], texts: Sequence[Text]) -> list[Turn]:
    """Return a conversation with a word in place of each text, which no template changes."""
    words = {text.text: stand_in(text) for text in texts}
    return [{**turn, "content": _replaced(turn["content"], words)} for turn in form]


def stand_in(text: Text) -> str:
    """Return the word for a text."""
    return f"standin{text.place}x"


def _replaced(content: JsonValue, words: Mapping[str, str]) -> JsonValue:
    if isinstance(content, str):
        for text, word in words.items():
            content = content.replace(text, word)
        return content
    if isinstance(content, Sequence):
        return [_replaced_part(part, words) for part in content]
    return content


def _replaced_part(part: JsonValue, words: Mapping[str, str]) -> JsonValue:
    if isinstance(part, Mapping) and "text" in part:
        return {**part, "text": _replaced(part["text"], words)}
    return part


def _texts(content: JsonValue) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
                yield text


def _forms(text: str) -> Iterator[str]:
    """Yield a text as it is, then as JSON writes it."""
    yield text
    for is_ascii in (False, True):
        if (quoted := json.dumps(text, ensure_ascii=is_ascii)[1:-1]) != text:
            yield quoted
