"""Counts the tokens that a prompt shares with another text, without tokenising all of it."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from backend.core.model import Reuse
from backend.core.prompt import Message, Tool, ToolCall
from backend.model.text.tokenizer import Tokenizer

LOOK_AHEAD_CHARS = 2000


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A special token: its start and end in the text, and its index in the tokens."""

    start: int
    end: int
    index: int


_ORIGIN = _Anchor(0, 0, 0)


class TokenizedText:
    """A text and its tokens.

    Tokenizers split a text at its special tokens before encoding each part. So another text must be
    encoded only from the last shared special token on.
    """

    def __init__(self, text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Locate the special tokens; `token_ids` are those of the text, without additions."""
        self.token_ids = token_ids
        self._text = text
        self._tokenizer = tokenizer
        self._anchors = _find_anchors(text, token_ids, tokenizer.special_texts)

    def shared_tokens(self, other: str) -> int:
        """Return the number of tokens at the start of both texts."""
        shared_chars = common_length(self._text, other)
        anchor = self._last_anchor(shared_chars)
        # A little more than the shared part: the following text may change the last token.
        part = other[anchor.start : shared_chars + LOOK_AHEAD_CHARS]
        ids = self._tokenizer.encode(part, adds_special=False)
        own = self.token_ids[anchor.index : anchor.index + len(ids)]
        return anchor.index + common_length(own, ids)

    def _last_anchor(self, end: int) -> _Anchor:
        """Return the last special token that ends before the character `end`."""
        count = bisect_right(self._anchors, end, key=lambda anchor: anchor.end)
        return self._anchors[count - 1] if count else _ORIGIN


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences of one type, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _find_anchors(
    text: str, token_ids: Sequence[int], special_texts: Mapping[int, str]
) -> list[_Anchor]:
    """Match the special tokens of the ids with those of the text; empty if they differ."""
    indices = [index for index, token_id in enumerate(token_ids) if token_id in special_texts]
    written = [special_texts[token_ids[index]] for index in indices]
    if not written:
        return []
    longest_first = sorted(set(written), key=len, reverse=True)
    matches = list(re.finditer("|".join(map(re.escape, longest_first)), text))
    if [match.group() for match in matches] != written:
        return []
    pairs = zip(matches, indices, strict=True)
    return [_Anchor(match.start(), match.end(), index) for match, index in pairs]


MAX_USER_TURNS = 8

_SYSTEM_ROLES = frozenset({"system", "developer"})
_CALL_ID = "call00000"  # nine letters and digits, as some templates require
_REPLY = Message(role="assistant", content="Yes.")
_QUESTION = Message(role="user", content="Why?")
_OTHER_QUESTION = Message(role="user", content="How?")


def branches(
    messages: Sequence[Message], tools: Sequence[Tool], reuse: Reuse
) -> list[list[Message]]:
    """Return conversations that begin like this one.

    The first shares only the system prompt. The second asks something after the reply: a template
    may then drop earlier thoughts, or the start of a thought at the end of this prompt. The
    others replace one of the last user turns, or add a tool's result.

    Args:
        tools: The tools that the model may call.
        reuse: Where a stored prefix can be reused. `ANYWHERE` needs only the first, `WITH_WINDOWS`
            only the first two.
    """
    roles = [message.role for message in messages]
    first = next((n for n, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    found = [_asked_otherwise(messages, first)]
    if reuse is not Reuse.ANYWHERE:
        found.append([*messages, _REPLY, _QUESTION])
    if reuse is Reuse.AT_SNAPSHOTS:
        turns = [n for n, role in enumerate(roles) if role == "user" and n > first]
        found += [_asked_otherwise(messages, turn) for turn in turns[-MAX_USER_TURNS:]]
        found += _results(messages, tools)
    return found


def _asked_otherwise(messages: Sequence[Message], turn: int) -> list[Message]:
    """Return the conversation before a turn, plus a question that differs in its first letter."""
    replaced = messages[turn].content if turn < len(messages) else ""
    begins_alike = replaced.lstrip()[:1].casefold() == _QUESTION.content[0].casefold()
    return [*messages[:turn], _OTHER_QUESTION if begins_alike else _QUESTION]


def _results(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[list[Message]]:
    """Yield continuations for a reply that calls a tool: the tool's result."""
    if tools:
        call = ToolCall(call_id=_CALL_ID, name=tools[0].name, arguments="{}")
        result = Message(role="tool", content="1", name=call.name, tool_call_id=call.call_id)
        yield [*messages, Message(role="assistant", tool_calls=(call,)), result]
