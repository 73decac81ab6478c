"""Find any of several texts in a stream, however the stream is cut.

Aho and Corasick, "Efficient string matching" (1975): a constant cost per character, and the
state alone tells how much of the latest text could still become a match.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _State:
    """The longest end of the text so far that begins a pattern.

    Attributes:
        pattern: A pattern that begins so; `depth` characters of it.
        match: The longest pattern that ends here.
        fallback: The state of the next shorter end; the root has none.
    """

    pattern: str = ""
    depth: int = 0
    match: str = ""
    fallback: "_State | None" = None
    edges: dict[str, "_State"] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text that this state stands for."""
        return self.pattern[: self.depth]

    def after(self, char: str) -> "_State":
        """Return the state that one more character leads to."""
        state = self
        while char not in state.edges and state.fallback is not None:
            state = state.fallback
        return state.edges.get(char, state)


class Automaton:
    """Knows a fixed set of texts; never changes, so any number of scanners may share it."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.root = _State()
        for pattern in patterns:
            self._add(pattern)
        self._link()
        first = "".join(map(re.escape, self.root.edges))
        self.first_char = re.compile(f"[{first}]" if first else "(?!)")

    def _add(self, pattern: str) -> None:
        state = self.root
        for depth, char in enumerate(pattern, start=1):
            state = state.edges.setdefault(char, _State(pattern, depth))
        state.match = pattern

    def _link(self) -> None:
        waiting = deque([self.root])
        while waiting:
            parent = waiting.popleft()
            for char, child in parent.edges.items():
                child.fallback = parent.fallback.after(char) if parent.fallback else self.root
                child.match = child.match or child.fallback.match
                waiting.append(child)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a piece of text came to.

    Attributes:
        safe: Text that cannot be part of a match any more; it may have been held back before.
        match: The pattern that stands behind it, or nothing.
        rest: What follows the match, not looked at yet.
    """

    safe: str
    match: str = ""
    rest: str = ""


class Scanner:
    """Reads one stream. The match that ends first wins; of several, the longest."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._state = automaton.root

    @property
    def held(self) -> str:
        """Text that may be the beginning of a match."""
        return self._state.text

    def feed(self, text: str) -> Scan:
        """Read on, up to the end of the first match."""
        before = state = self._state
        position = 0
        while position < len(text) and not state.match:
            if not state.depth:
                candidate = self._automaton.first_char.search(text, position)
                if candidate is None:
                    position = len(text)
                    break
                position = candidate.start()
            state = state.after(text[position])
            position += 1
        self._state = self._automaton.root if state.match else state
        held = len(state.match) or state.depth
        return Scan(_released(before, text, position - held), state.match, text[position:])

    def finish(self) -> str:
        """Return what is held back, and begin anew."""
        held = self.held
        self._state = self._automaton.root
        return held


def _released(before: _State, text: str, end: int) -> str:
    """Return what was held back before, and `text` up to `end`; below zero, so much less."""
    return before.text + text[:end] if end >= 0 else before.pattern[: before.depth + end]
