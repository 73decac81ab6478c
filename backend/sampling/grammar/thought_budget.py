"""Cuts short the thoughts of a reply when they exhaust their token budget."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from backend.core.guide import GrammarParts, ReplyGrammar, ReplyMatcher, ThoughtBudget
from backend.formats.code_span import CodeTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from backend.sampling.grammar.thought_marks import ThoughtMarks

# Matchers rewind over drafts, which are shorter.
MAX_STEPS_BACK = 256
_BITS_PER_WORD = 32
_ALL_BITS = -1


class BudgetedGrammar:
    """A thinking budget, and the reply's grammar if there is one; thread-safe."""

    def __init__(
        self, budget: ThoughtBudget, marks: ThoughtMarks, grammar: ReplyGrammar | None
    ) -> None:
        """Combine a budget with an end that can be written, and a grammar that allows it."""
        rules = grammar.parts.rules if grammar else ()
        self.parts = GrammarParts(rules=rules, budget=budget)
        self._budget = budget
        self._marks = marks
        self._grammar = grammar

    def matcher(self) -> _BudgetMatcher:
        """Return a matcher for one reply."""
        inner = self._grammar.matcher() if self._grammar else None
        return _BudgetMatcher(self._budget, self._marks, inner)


@dataclass(frozen=True, slots=True)
class _State:
    """The progress of a reply.

    Attributes:
        used: Number of thinking tokens.
        held: Bytes that may be the beginning of a mark.
        last: The last byte of the content other than whitespace; empty before any.
        closing: Tokens that must come next.
        is_over: Whether no more thoughts can begin.
    """

    is_open: bool
    used: int
    held: bytes
    code: CodeTracker
    last: bytes = b""
    closing: tuple[int, ...] = ()
    is_over: bool = False


class _BudgetMatcher:
    """Tells which tokens may come next in one reply; used by one thread at a time.

    A thought is cut short with the tokens that close it: the rest of the end if the model has
    begun to spell it, otherwise the end after the parting words, for which part of the budget is
    reserved. Once the budget is used up, tokens that certainly begin a thought are forbidden; a
    thought that begins anyway, because its start could not be foreseen, is closed at once.
    """

    def __init__(
        self, budget: ThoughtBudget, marks: ThoughtMarks, inner: ReplyMatcher | None
    ) -> None:
        """Begin a reply, with the matcher of its grammar at the start."""
        self._tokens = budget.tokens
        self._is_first = budget.is_first
        self._marks = marks
        self._inner = inner
        has_room = 2 * len(marks.parting) <= budget.tokens
        self._parting = marks.parting if has_room else ()
        self._most_used = budget.tokens - len(self._parting)
        begun = _State(is_open=budget.is_open, used=0, held=b"", code=CodeTracker())
        self._states = deque([self._settled(begun)], maxlen=MAX_STEPS_BACK)

    @property
    def error(self) -> str | None:
        return self._inner.error if self._inner else None

    def consume(self, token_id: int) -> bool:
        state = self._states[-1]
        is_allowed = self._allows(state, token_id)
        if self._inner is not None:
            is_allowed = self._inner.consume(token_id) and is_allowed
        self._states.append(self._settled(self._after(state, token_id)))
        return is_allowed

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        state = self._states[-1]
        if state.closing:
            row[:] = 0
            _words(row)[state.closing[0] // _BITS_PER_WORD] = _bit(state.closing[0])
            return
        if self._inner is None:
            row[:] = _ALL_BITS
        else:
            self._inner.fill_mask(row)
        self._bar(row, state)

    @property
    def may_force(self) -> bool:
        """Whether tokens may be forced after the next one; not before a free thought must end."""
        state = self._states[-1]
        is_last = state.is_open and state.used + 1 >= self._most_used
        return is_last or (self._inner is not None and self._inner.may_force)

    def forced(self) -> list[int]:
        if closing := self._states[-1].closing:
            return list(closing)
        forced = self._inner.forced() if self._inner else []
        return forced[: self._count_affordable(forced)]

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        count = self._count_affordable(token_ids)
        return self._inner.count_allowed(token_ids[:count]) if self._inner else count

    def step_back(self, count: int) -> None:
        """Undo the latest `count` tokens, fewer than `MAX_STEPS_BACK`."""
        for _ in range(count):
            self._states.pop()
        if self._inner is not None and count:
            self._inner.step_back(count)

    def _count_affordable(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens the budget allows, regardless of the grammar."""
        state = self._states[-1]
        for count, token_id in enumerate(token_ids):
            if not self._allows(state, token_id):
                return count
            state = self._with_end(self._after(state, token_id))
        return len(token_ids)

    def _allows(self, state: _State, token_id: int) -> bool:
        if state.closing:
            return token_id == state.closing[0]
        return token_id not in self._barred(state)

    def _barred(self, state: _State) -> tuple[int, ...]:
        """Return the tokens that the remaining budget cannot pay for.

        They begin a thought, or a character that could not be completed before the thought's end.
        """
        if state.is_open:
            return self._marks.cutting(max(self._most_used - state.used - 1, 0))
        may_open = self._is_spent(state) and self._marks.may_follow(state.last)
        return self._marks.barred(state.held) if may_open else ()

    def _bar(self, row: NDArray[np.int32], state: _State) -> None:
        barred = self._barred(state)
        if not barred:
            return
        allowed = row.copy()
        for token_id in barred:
            _words(row)[token_id // _BITS_PER_WORD] &= ~_bit(token_id)
        if not row.any():
            row[:] = allowed

    def _is_spent(self, state: _State) -> bool:
        return state.used >= self._most_used and not state.is_over

    def _after(self, state: _State, token_id: int) -> _State:
        """Return the state after a token, allowed or not."""
        if state.closing and token_id == state.closing[0]:
            closing = state.closing[1:]
            used = min(state.used + 1, self._tokens)
            is_over = self._is_first and not closing
            return replace(
                state, is_open=bool(closing), used=used, held=b"", closing=closing, is_over=is_over
            )
        if state.is_over:
            return state
        return self._read(state, self._marks.token_bytes(token_id))

    def _settled(self, state: _State) -> _State:
        """Return the state with the end that must come next, once the grammar allows it."""
        settled = self._with_end(state)
        if self._inner is None or state.closing or not settled.closing:
            return settled
        allowed = self._inner.count_allowed(settled.closing)
        return settled if allowed == len(settled.closing) else state

    def _with_end(self, state: _State) -> _State:
        if not state.is_open or state.closing or not self._is_spent(state):
            return state
        rest = self._marks.rest_of_end(state.held)
        has_begun = rest != self._marks.end
        has_room = state.used + len(self._parting) <= self._tokens
        parting = self._parting if has_room and not has_begun else ()
        return replace(state, closing=(*parting, *rest))

    def _read(self, state: _State, text: bytes) -> _State:
        """Return the state after a token of this text that was not forced."""
        reading = _Reading(state, text, self._marks)
        reading.read_all()
        is_over = self._is_first and reading.has_content
        return replace(
            state,
            is_open=reading.is_open and not is_over,
            used=state.used + reading.is_thought,
            held=reading.held,
            code=reading.code,
            last=reading.last,
            closing=(),
            is_over=is_over,
        )


class _Reading:
    """Reads the text of one token.

    Attributes:
        held: Bytes that may be part of a mark.
        has_content: Whether it has read content other than thoughts and space, or a thought's end.
    """

    def __init__(self, state: _State, text: bytes, marks: ThoughtMarks) -> None:
        self.is_open = state.is_open
        self.held = state.held + text
        self.code = copy(state.code)
        self.last = state.last
        self.has_content = False
        self._was_open = state.is_open
        self._rest = b""
        self._marks = marks

    @property
    def is_thought(self) -> bool:
        # A token that opens a thought may include a line break, which does not count.
        return self.is_open and (self._was_open or bool(self._rest.strip()))

    def read_all(self) -> None:
        while True:
            place, mark = _first(self._awaited, self.held)
            if not mark:
                break
            before, self.held = self.held[:place], self.held[place + len(mark) :]
            if self.is_open:
                self.is_open, self.has_content = False, True
            else:
                self._begin(before, mark)
        kept = _begun(self._awaited, self.held)
        self._rest, self.held = self.held, self.held[len(self.held) - kept :]
        if not self.is_open:
            self._pass(self._rest[: len(self._rest) - kept])

    @property
    def _awaited(self) -> Sequence[bytes]:
        return self._marks.ends if self.is_open else self._marks.starts

    def _begin(self, before: bytes, mark: bytes) -> None:
        self._pass(before)
        self.code.settle()
        is_in_code = self.code.quotes(mark.decode()) and (
            self.code.has_prose or not self.code.is_fenced
        )
        is_quoted = self._marks.texts.is_quotable and is_in_code
        may_open = mark in self._marks.later_starts or self._marks.may_follow(self.last)
        self.is_open = may_open and not is_quoted
        if not self.is_open:
            self._pass(mark)

    def _pass(self, content: bytes) -> None:
        self.last = content.rstrip()[-1:] or self.last
        self.has_content = self.has_content or bool(content.strip())
        self.code.follow(content.decode(errors="replace"))


def _first(marks: Sequence[bytes], text: bytes) -> tuple[int, bytes]:
    """Return the position of the first mark in a text, and the longest mark there."""
    places = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    place, _, mark = min(places, default=(0, 0, b""))
    return place, mark


def _begun(marks: Sequence[bytes], text: bytes) -> int:
    """Return how many bytes at the end of a text may be the start of a mark."""
    longest = min(max(map(len, marks)) - 1, len(text))
    sizes = (n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in marks))
    return next(sizes, 0)


def _words(row: NDArray[np.int32]) -> NDArray[np.uint32]:
    return row.view(np.uint32)


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % _BITS_PER_WORD)
