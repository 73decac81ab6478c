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
    def is_pattern(self) -> bool:
        """Whether a pattern ends here that begins where this state does."""
        return len(self.match) == self.depth

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

    def __init__(self, patterns: Iterable[str], *, prefers_longer: bool = False) -> None:
        """Take the texts.

        Args:
            patterns: The texts.
            prefers_longer: Whether a text that another begins with waits for that one.
        """
        self.prefers_longer = prefers_longer
        self.root = _State()
        for pattern in patterns:
            self._add(pattern)
        self._link()
        first = "".join(map(re.escape, self.root.edges))
        self.first_char = re.compile(f"[{first}]" if first else "(?!)")

    def find(self, text: str, position: int = 0) -> tuple[int, str]:
        """Return where the match that ends first begins, and which it is.

        Without one, return where the end of the text may begin one, or else its end, and nothing.
        """
        scan = Scanner(self).feed(text[position:])
        return position + len(scan.safe), scan.match

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
    """The outcome of a piece of text.

    Attributes:
        safe: Text that cannot be part of a match any more; it may have been held back before.
        match: The pattern that follows it, or nothing.
        rest: The text after the match, not looked at yet.
    """

    safe: str
    match: str = ""
    rest: str = ""


class Scanner:
    """Reads one stream. The match that ends first wins; of several, the longest."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._state = automaton.root
        self._longer: _State | None = None

    @property
    def held(self) -> str:
        """Text that may be the beginning of a match."""
        return self._state.text

    def feed(self, text: str) -> Scan:
        """Read on, up to the end of the first match."""
        if self._longer:
            return self._go_on(text)
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
        if state.match and state.is_pattern and state.edges and self._automaton.prefers_longer:
            scan = Scan(_released(before, text, position - state.depth))
            self._state = self._longer = state
            after = self._go_on(text[position:])
            return Scan(scan.safe + after.safe, after.match, after.rest)
        self._state = self._automaton.root if state.match else state
        held = len(state.match) or state.depth
        return Scan(_released(before, text, position - held), state.match, text[position:])

    def _go_on(self, text: str) -> Scan:
        """Look for a longer pattern than the one that has ended."""
        shorter, state = self._longer, self._state
        for position, char in enumerate(text):
            if char not in state.edges:
                self._state = self._automaton.root
                self._longer = None
                rest = state.text[shorter.depth :] if shorter else ""
                return Scan("", shorter.match if shorter else "", rest + text[position:])
            state = state.edges[char]
            if state.match and not state.edges:
                self._state = self._automaton.root
                self._longer = None
                return Scan("", state.match, text[position + 1 :])
        self._state = state
        return Scan("")

    def finish(self) -> str:
        """Return the text that is held back, and begin anew."""
        held = "" if self._state is self._longer else self.held
        self._state = self._automaton.root
        self._longer = None
        return held


def _released(before: _State, text: str, end: int) -> str:
    """Return the text held back before, and `text` up to `end`; below zero, so much less."""
    return before.text + text[:end] if end >= 0 else before.pattern[: before.depth + end]
