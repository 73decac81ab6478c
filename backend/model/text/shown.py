"""Finds the texts of a conversation that are missing in a rendered prompt."""

import json
from collections.abc import Iterator, Mapping, Sequence

from backend.core.prompt import JsonValue
from backend.model.text.turns import Turn

# Templates may drop what an assistant said: its thoughts, or a preamble of calls.
_KEPT_ROLES = frozenset({"system", "user", "tool"})


def said(turns: Sequence[Turn]) -> list[tuple[int, str]]:
    """Return the texts that a prompt has to show, without their outer white space.

    Each comes with the index of its turn.
    """
    return [
        (place, text.strip())
        for place, turn in enumerate(turns)
        if turn["role"] in _KEPT_ROLES
        for text in _texts(turn["content"])
        if text.strip()
    ]


def missing(texts: Sequence[tuple[int, str]], prompt: str) -> list[tuple[int, str]]:
    """Return the texts that are not in a prompt, neither plain nor as JSON.

    Fast if they are in order: a search begins where the last one ended.
    """
    lost: list[tuple[int, str]] = []
    start = 0
    for place, text in texts:
        found = prompt.find(text, start)
        if found >= 0:
            start = found + len(text)
        elif not any(form in prompt for form in _forms(text)):
            lost.append((place, text))
    return lost


def with_stand_ins(form: Sequence[Turn], texts: Sequence[tuple[int, str]]) -> list[Turn]:
    """Return a conversation with a word in place of each text, which no template changes."""
    words = {text: stand_in(place) for place, text in texts}
    return [{**turn, "content": _replaced(turn["content"], words)} for turn in form]


def stand_in(place: int) -> str:
    """Return the word for the text of a turn."""
    return f"standin{place}x"


def _replaced(content: JsonValue, words: Mapping[str, str]) -> JsonValue:
    if isinstance(content, str):
        for text, word in words.items():
            content = content.replace(text, word)
        return content
    if isinstance(content, Mapping):
        return {key: _replaced(value, words) for key, value in content.items()}
    if isinstance(content, Sequence):
        return [_replaced(part, words) for part in content]
    return content


def _texts(content: JsonValue) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
                yield text


def _forms(text: str) -> Iterator[str]:
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
