"""Folds the stream of a reply into a unary reply."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from backend.core.step import (
    AlternativeLogprob,
    ContentDelta,
    Delta,
    Finish,
    FinishReason,
    Increment,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

FLOOR = -9999.0
"""Represents minus infinity, which JSON lacks."""


def to_json(tokens: Sequence[TokenLogprob]) -> bytes:
    """Return `{"content": [...]}`: one entry per token, with its most likely alternatives."""
    content = [
        _entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens
    ]
    return json.dumps({"content": content}, ensure_ascii=False, allow_nan=False).encode()


def _entry(token: TokenLogprob | AlternativeLogprob) -> dict[str, object]:
    return {
        "id": token.token_id,
        "token": token.token.decode(errors="replace"),
        "bytes": list(token.token),
        "logprob": token.logprob if math.isfinite(token.logprob) else FLOOR,
    }


@dataclass(frozen=True, slots=True)
class CollectedCall:
    """A tool call in full; `arguments` is JSON text if the call was completed."""

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A complete reply."""

    content: str
    reasoning: str
    tool_calls: tuple[CollectedCall, ...]
    finish: Finish
    usage: Usage


@dataclass(slots=True)
class _OpenCall:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Collector:
    """Folds increments into a completion."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _OpenCall] = {}
        self._finish = Finish(FinishReason.STOP)
        self._usage = Usage()

    def add(self, increment: Increment) -> None:
        """Add the next increment."""
        for delta in increment.deltas:
            self._add_delta(delta)
        self._usage = increment.usage
        self._finish = increment.finish or self._finish

    @property
    def completion(self) -> Completion:
        """The reply so far; without increments, an empty reply that stopped."""
        calls = sorted(self._calls.items())
        return Completion(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(
                CollectedCall(index, call.call_id, call.name, "".join(call.arguments))
                for index, call in calls
            ),
            finish=self._finish,
            usage=self._usage,
        )

    def _add_delta(self, delta: Delta) -> None:
        match delta:
            case ContentDelta():
                self._content.append(delta.text)
            case ReasoningDelta():
                self._reasoning.append(delta.text)
            case ToolCallDelta():
                call = self._calls.setdefault(delta.index, _OpenCall())
                call.call_id = delta.call_id or call.call_id
                call.name = delta.name or call.name
                call.arguments.append(delta.arguments)
            case _:
                assert_never(delta)
