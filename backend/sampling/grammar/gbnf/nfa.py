"""All terminals as one automaton over character classes."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_

from backend.sampling.grammar.charset import CharSet
from backend.sampling.grammar.gbnf.ast import Atom, Item, Literal, Reference, Rules

MAX_STATES = 3000
MAX_CLASSES = 500
MAX_DEPTH = 60
MAX_MOVES = 300_000


class OverBudgetError(Exception):
    """There are too many states to examine."""


class CharacterClasses:
    """The coarsest partition of characters that tells some sets apart; bit masks denote subsets."""

    def __init__(self, sets: Iterable[CharSet]) -> None:
        """Partition the characters.

        Raises:
            OverBudgetError: There are too many classes.
        """
        edges = {edge for s in sets for low, high in s.ranges for edge in (low, high + 1)}
        if len(edges) > MAX_CLASSES:
            raise OverBudgetError
        self._edges = sorted(edges)
        self._masks: dict[CharSet, int] = {}

    def mask(self, characters: CharSet) -> int:
        """Return the mask of the classes that make up one of the sets."""
        if characters not in self._masks:
            self._masks[characters] = sum(
                (1 << bisect_right(self._edges, high)) - (1 << bisect_left(self._edges, low))
                for low, high in characters.ranges
            )
        return self._masks[characters]


class Nfa:
    """Thompson's construction for all terminals together, from one start state.

    Source: Thompson, Regular Expression Search Algorithm (1968).
    """

    def __init__(self, rules: Rules, classes: CharacterClasses) -> None:
        self._rules = rules
        self._classes = classes
        self._moves: list[list[tuple[int, int]]] = []
        self._skips: list[list[int]] = []
        self._ends: dict[int, Item] = {}
        self._start = self._new()

    def add(self, terminal: Item) -> None:
        """Add a terminal.

        Raises:
            OverBudgetError: It is too large.
        """
        first = self._new()
        self._skips[self._start].append(first)
        self._ends[self._item(first, terminal, 0)] = terminal

    def states(self) -> Iterator[tuple[list[Item], int]]:
        """Yield, for each reachable set of states, the terminals that end there and the ways on.

        Empty text is not counted. The ways on are a mask of character classes.

        Raises:
            OverBudgetError: There are too many transitions.
        """
        first = self._closure([self._start])
        seen = {first}
        pending = [first]
        budget = MAX_MOVES
        while pending:
            states = pending.pop()
            moves = [move for state in states for move in self._moves[state]]
            onward = reduce(or_, (mask for mask, _ in moves), 0)
            if states is not first:
                yield [self._ends[state] for state in states if state in self._ends], onward
            for targets in _by_class(moves, onward):
                budget -= len(moves)
                if budget < 0:
                    raise OverBudgetError
                reached = self._closure(targets)
                if reached not in seen:
                    seen.add(reached)
                    pending.append(reached)

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        reached = set(states)
        pending = list(reached)
        while pending:
            new = set(self._skips[pending.pop()]) - reached
            reached |= new
            pending += new
        return frozenset(reached)

    def _item(self, start: int, item: Item, depth: int) -> int:
        """Append an item and return the state after it. No transition leads back to `start`."""
        for _ in range(item.least):
            start = self._atom(start, item.atom, depth)
        if item.most is None:
            entry = self._new()
            self._skips[start].append(entry)
            self._skips[self._atom(entry, item.atom, depth)].append(entry)
            return entry
        end = self._new()
        for _ in range(item.most - item.least):
            self._skips[start].append(end)
            start = self._atom(start, item.atom, depth)
        self._skips[start].append(end)
        return end

    def _atom(self, start: int, atom: Atom, depth: int) -> int:
        match atom:
            case Literal(text):
                for character in text:
                    start = self._move(start, CharSet.single(character))
                return start
            case CharSet():
                return self._move(start, atom)
            case Reference(name):
                return self._rule(start, name, depth + 1)
        raise TypeError(atom)

    def _rule(self, start: int, name: str, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise OverBudgetError
        end = self._new()
        for alternative in self._rules[name].alternatives:
            state = start
            for item in alternative:
                state = self._item(state, item, depth)
            self._skips[state].append(end)
        return end

    def _move(self, start: int, characters: CharSet) -> int:
        target = self._new()
        self._moves[start].append((self._classes.mask(characters), target))
        return target

    def _new(self) -> int:
        if len(self._moves) >= MAX_STATES:
            raise OverBudgetError
        self._moves.append([])
        self._skips.append([])
        return len(self._moves) - 1


def _by_class(moves: list[tuple[int, int]], onward: int) -> Iterator[frozenset[int]]:
    """Yield the sets of states that single character classes lead to."""
    while onward:
        single = onward & -onward
        targets = frozenset(target for mask, target in moves if mask & single)
        shared = onward
        for mask, _ in moves:
            shared &= mask if mask & single else ~mask
        onward &= ~shared
        yield targets
