"""Translates GBNF to llguidance's variant of Lark.

The lexer reads as much as it can in one piece; where the longest match of pieces may be wrong,
which an automaton of all pieces tells, the parser reads character by character.

A definition contains no parentheses: a group becomes a definition of its own. Names are
numbered in the order in which they are reached from the root, so grammars that differ only in
rule names or rule order produce the same text.
"""

import json
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, reduce
from operator import or_
from typing import TypeVar

from backend.sampling.grammar.gbnf_parser import (
    ROOT,
    Alternative,
    Atom,
    Cursor,
    Item,
    Literal,
    Reference,
    Rule,
    Rules,
    TokenReference,
    parse_gbnf,
)
from backend.sampling.grammar.gbnf_rules import (
    SPELLED,
    may_be_empty,
    nullable_rules,
    prune,
    regular_rules,
    require_bounded,
    require_defined,
    require_finite,
    require_tokens,
    unroll,
    with_leading_markers,
)
from backend.sampling.grammar.vocabulary import ANY_CHARACTER, CharSet, Vocabulary
from backend.sampling.grammar.writer import LarkGrammar

MAX_STATES = 3000
MAX_CLASSES = 500
MAX_DEPTH = 60
MAX_MOVES = 300_000


class _OverBudgetError(Exception):
    """There are too many states to examine."""


class _CharacterClasses:
    """The coarsest partition of characters that tells some sets apart; bit masks denote subsets."""

    def __init__(self, sets: Iterable[CharSet]) -> None:
        """Partition the characters.

        Raises:
            _OverBudgetError: There are too many classes.
        """
        edges = {edge for s in sets for low, high in s.ranges for edge in (low, high + 1)}
        if len(edges) > MAX_CLASSES:
            raise _OverBudgetError
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


class _Nfa:
    """Thompson's construction for all terminals together, from one start state.

    Source: Thompson, Regular Expression Search Algorithm (1968).
    """

    def __init__(self, rules: Rules, classes: _CharacterClasses) -> None:
        self._rules = rules
        self._classes = classes
        self._moves: list[list[tuple[int, int]]] = []
        self._skips: list[list[int]] = []
        self._ends: dict[int, Item] = {}
        self._start = self._new()

    def add(self, terminal: Item) -> None:
        """Add a terminal.

        Raises:
            _OverBudgetError: It is too large.
        """
        first = self._new()
        self._skips[self._start].append(first)
        self._ends[self._item(first, terminal, 0)] = terminal

    def states(self) -> Iterator[tuple[list[Item], int]]:
        """Yield, for each reachable set of states, the terminals that end there and the ways on.

        Empty text is not counted. The ways on are a mask of character classes.

        Raises:
            _OverBudgetError: There are too many transitions.
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
                    raise _OverBudgetError
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
            raise _OverBudgetError
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
            raise _OverBudgetError
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


_MAX_PASSES = 40
_MAX_ITEMS = 5000

Place = Item | str
_Key = TypeVar("_Key")


def terminals(rules: Rules, regular: Collection[str]) -> frozenset[Item]:
    """Return the items of irregular rules that are themselves regular."""
    return frozenset(
        item
        for name, rule in rules.items()
        if name not in regular
        for item in rule.items()
        if _is_regular(item.atom, regular)
    )


def _cuts_are_certain(rules: Rules, irregular: Collection[str], pieces: Collection[Item]) -> bool:
    """Return whether the longest match of `pieces` is provably right wherever they meet.

    A grammar that is too large counts as uncertain.
    """
    if sum(1 for rule in rules.values() for _ in rule.items()) > _MAX_ITEMS:
        return False
    try:
        classes = _CharacterClasses(_sets(rules))
        after = _Neighbours(rules, classes).after(pieces, irregular)
        automaton = _Nfa(rules, classes)
        for piece in pieces:
            automaton.add(piece)
        return all(
            not onward & after[piece] for ends, onward in automaton.states() for piece in ends
        )
    except _OverBudgetError:
        return False


class _Neighbours:
    """Tells which classes of characters may begin an item, and which may follow it."""

    def __init__(self, rules: Rules, classes: _CharacterClasses) -> None:
        self._rules = rules
        self._classes = classes
        self._nullable = nullable_rules(rules)
        self._first = _settled(dict.fromkeys(rules, 0), self._grow_first)

    def after(self, pieces: Collection[Item], irregular: Collection[str]) -> dict[Place, int]:
        """Return the characters that may follow each piece and each irregular rule."""

        def grow(after: dict[Place, int]) -> None:
            for name in irregular:
                for alternative in self._rules[name].alternatives:
                    self._grow_after(after, name, alternative, pieces)

        return _settled(dict.fromkeys([*pieces, *irregular], 0), grow)

    def _grow_first(self, first: dict[str, int]) -> None:
        for name, rule in self._rules.items():
            for alternative in rule.alternatives:
                for item in alternative:
                    first[name] |= self._first_of(item, first)
                    if not may_be_empty(item, self._nullable):
                        break

    def _grow_after(
        self, after: dict[Place, int], name: str, alternative: Alternative, pieces: Collection[Item]
    ) -> None:
        onward = after[name]
        for item in reversed(alternative):
            first = self._first_of(item, self._first)
            if item in pieces:
                after[item] |= onward
            elif isinstance(item.atom, Reference) and item.atom.rule in after:
                after[item.atom.rule] |= onward if item.most == 1 else onward | first
            onward = onward | first if may_be_empty(item, self._nullable) else first

    def _first_of(self, item: Item, first: Mapping[str, int]) -> int:
        match item.atom:
            case Literal(text):
                return self._classes.mask(CharSet.single(text[0])) if text else 0
            case CharSet():
                return self._classes.mask(item.atom)
            case Reference(name):
                return first[name]
            case TokenReference():  # not a character: it ends the text before it
                return 0


def _settled(masks: dict[_Key, int], grow: Callable[[dict[_Key, int]], None]) -> dict[_Key, int]:
    """Grow masks until they no longer change."""
    for _ in range(_MAX_PASSES):
        before = dict(masks)
        grow(masks)
        if masks == before:
            return masks
    raise _OverBudgetError


def _sets(rules: Rules) -> Iterator[CharSet]:
    for item in (item for rule in rules.values() for item in rule.items()):
        if isinstance(item.atom, CharSet):
            yield item.atom
        elif isinstance(item.atom, Literal):
            yield from map(CharSet.single, item.atom.text)


def _is_regular(atom: Atom, regular: Collection[str]) -> bool:
    match atom:
        case Reference(name):
            return name in regular
        case TokenReference():
            return False
        case _:
            return True


_PRINTABLE = CharSet.of([(0x20, 0x7E)])


def _write_lark(rules: Rules, terminals: Collection[Item], vocabulary: Vocabulary) -> LarkGrammar:
    """Return the grammar of the root rule.

    The lexer reads `terminals` in one piece, with all that they refer to: neither recursion nor
    tokens. The parser handles the rest.
    """
    writer = _Writer(rules, terminals, vocabulary)
    start = writer.phrase(Item(Reference(ROOT)))
    return LarkGrammar(start, tuple(writer.definitions()))


# Of space between two values: models would write more of it than anybody reads, up to the limit of
# their reply.
MAX_LINE_BREAKS, MAX_BLANKS = 2, 40
_LINE_BREAK = CharSet.single("\n")
_BLANKS = CharSet.of([(ord(character), ord(character)) for character in " \t\r"])


def _space(item: Item, rules: Rules) -> CharSet | None:
    """Return the characters of a run of blanks and line breaks of any length, if it is one."""
    if item.most is not None or item.least > 1:
        return None
    characters = _characters(item.atom, rules)
    is_space = not characters & ~(_BLANKS | _LINE_BREAK)
    return characters if is_space and characters & _BLANKS and characters & _LINE_BREAK else None


def _characters(atom: Atom, rules: Rules) -> CharSet:
    """Return the characters that an atom is one of; any of them where it may be longer."""
    if isinstance(atom, Reference):
        return reduce(or_, map(_one_character, rules[atom.rule].alternatives))
    return _one_character((Item(atom),))


def _one_character(alternative: Alternative) -> CharSet:
    match alternative:
        case (Item(CharSet() as characters, 1, 1),):
            return characters
        case (Item(Literal(text), 1, 1),) if len(text) == 1:
            return CharSet.single(text)
    return ANY_CHARACTER


class _Writer:
    """Writes definitions, followed by those that they refer to.

    The parser reads phrases, named r1, r2, ...; the lexer reads terminals, T1, T2, ...
    """

    def __init__(self, rules: Rules, terminals: Collection[Item], vocabulary: Vocabulary) -> None:
        self._rules = dict(rules)
        self._terminals = frozenset(terminals)
        self._vocabulary = vocabulary
        self._names: dict[tuple[str, str | Item], str] = {}
        self._pending: deque[tuple[str, str | Item]] = deque()

    def definitions(self) -> list[str]:
        lines = []
        while self._pending:
            kind, defined = key = self._pending.popleft()
            if isinstance(defined, Item):
                body = self._repeated("T", defined)
            else:
                write = self.phrase if kind == "r" else partial(self._repeated, kind)
                alternatives = self._rules[defined].alternatives
                body = " | ".join(" ".join(map(write, items)) or '""' for items in alternatives)
            lines.append(f"{self._names[key]}: {body}")
        return lines

    def phrase(self, item: Item) -> str:
        if item not in self._terminals:
            return self._repeated("r", item)
        if (item.least, item.most) == (1, 1):
            return self._atom("T", item.atom)
        return self._name("T", item)

    def _repeated(self, kind: str, item: Item) -> str:
        if (space := _space(item, self._rules)) is not None:
            return self._name(kind, self._short_space(space, item.least))
        return self._atom(kind, item.atom) + _count(item)

    def _short_space(self, space: CharSet, least: int) -> str:
        """Return the name of a rule for so much of it as anybody reads."""
        blanks = Item(space & _BLANKS, 0, MAX_BLANKS)
        line = f"#line {space}"
        self._rules[line] = Rule(((Item(_LINE_BREAK), blanks),))
        lines = blanks, Item(Reference(line), 0, MAX_LINE_BREAKS)
        name = f"#space {space} {least}"
        self._rules[name] = Rule(((Item(space), *lines) if least else lines,))
        return name

    def _atom(self, kind: str, atom: Atom) -> str:
        match atom:
            case Literal(text):
                return _quoted(text)
            case CharSet(ranges):
                return "/[" + "".join(f"{_escaped(a)}-{_escaped(b)}" for a, b in ranges) + "]/"
            case Reference(name):
                return self._name(kind, name)
            case TokenReference():
                return self._token(atom)

    def _token(self, reference: TokenReference) -> str:
        token_id = self._vocabulary.token_id(reference.token)
        if not reference.is_negated:
            return f"<[{token_id}]>"
        return f"<[^{','.join(map(str, [token_id, *self._vocabulary.eos_ids]))}]>"

    def _name(self, kind: str, defined: str | Item) -> str:
        key = kind, defined
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self._pending.append(key)
        return self._names[key]


def _quoted(text: str) -> str:
    if all(character in _PRINTABLE for character in text):
        return json.dumps(text)
    return "/" + "".join(_escaped(ord(character)) for character in text) + "/"


def _escaped(code_point: int) -> str:
    return f"\\x{{{code_point:X}}}"


def _count(item: Item) -> str:
    match item.least, item.most:
        case 1, 1:
            return ""
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case least, None:
            return f"{{{least},}}"
        case least, most:
            return f"{{{least},{most}}}"


def gbnf_to_lark(text: str, vocabulary: Vocabulary) -> LarkGrammar:
    """Translate a grammar, with tokens of this model.

    Raises:
        GrammarError: The text is not a grammar, or cannot be enforced.
    """
    cursor = Cursor(text)
    rules = parse_gbnf(cursor)
    require_defined(rules, cursor)
    require_tokens(rules, cursor, vocabulary)
    require_finite(rules, cursor)
    needed = prune(rules, vocabulary.characters)
    require_bounded(needed)
    plain = unroll(needed)
    for candidate in (with_leading_markers(plain, vocabulary.markers), plain):
        if (pieces := _certain_pieces(candidate)) is not None:
            return _write_lark(candidate, pieces, vocabulary)
    return _write_lark(_spelled(plain), (), vocabulary)


def _certain_pieces(rules: Rules) -> frozenset[Item] | None:
    """Return terminals that the grammar can be split into, or `None` if that is not certain."""
    regular = regular_rules(rules)
    if ROOT in regular:
        return frozenset({Item(Reference(ROOT))})
    pieces = terminals(rules, regular)
    # The spelled root meets no other piece: its alternatives begin with a token.
    meeting = pieces - {Item(Reference(SPELLED))}
    return pieces if _cuts_are_certain(rules, rules.keys() - regular, meeting) else None


def _spelled(rules: Rules) -> dict[str, Rule]:
    """Return the rules with every literal as a sequence of its characters."""
    spelled: dict[str, Rule] = {}
    for name, rule in rules.items():
        alternatives = [tuple(_letters(alternative, spelled)) for alternative in rule.alternatives]
        spelled[name] = Rule(tuple(alternatives), rule.is_group)
    return spelled


def _letters(alternative: Alternative, groups: dict[str, Rule]) -> Iterator[Item]:
    for item in alternative:
        if not isinstance(item.atom, Literal):
            yield item
            continue
        letters = tuple(Item(CharSet.single(character)) for character in item.atom.text)
        if (item.least, item.most) == (1, 1):
            yield from letters
        else:
            name = f"#{item.atom.text}"
            groups[name] = Rule((letters,), is_group=True)
            yield Item(Reference(name), item.least, item.most)
