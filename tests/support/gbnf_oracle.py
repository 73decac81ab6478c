"""Tells whether a GBNF grammar accepts a text, by trying every derivation.

It reads no text and shares nothing with the backend: grammars are made as trees, written out for
the backend, and asked here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Class:
    ranges: tuple[tuple[str, str], ...]
    is_negated: bool = False

    def holds(self, character):
        return self.is_negated != any(low <= character <= high for low, high in self.ranges)


@dataclass(frozen=True)
class Ref:
    name: str


@dataclass(frozen=True)
class Seq:
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Alt:
    options: tuple["Node", ...]


@dataclass(frozen=True)
class Rep:
    item: "Node"
    least: int
    most: int | None


Node = Text | Class | Ref | Seq | Alt | Rep
_SAMPLES = "abcxyz 019\n\té中😀"


def written(rules: Mapping[str, Node]) -> str:
    return "".join(f"{name} ::= {_written(body)}\n" for name, body in rules.items())


def _written(node: Node) -> str:
    match node:
        case Text(text):
            written = '"' + "".join(map(_escaped, text)) + '"'
        case Class((), True):
            written = "."
        case Class(ranges, is_negated):
            body = "".join(f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges)
            written = f"[{'^' * is_negated}{body}]"
        case Ref(name):
            written = name
        case Seq(items):
            written = "(" + " ".join(map(_written, items)) + ")"
        case Alt(options):
            written = "(" + "\n | ".join(map(_written, options)) + ")"
        case Rep(item, least, most):
            written = f"({_written(item)}){_count(least, most)}"
    return written


def _count(least, most):
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (least, most) in short:
        return short[least, most]
    if least == most:
        return f"{{{least}}}"
    return f"{{{least},{'' if most is None else most}}}"


def _escaped(character):
    if character in '"\\[]-':
        return f"\\{character}"
    code = ord(character)
    if code < 0x20 or character == "^":
        return f"\\x{code:02x}"
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04X}" if code > 0x7F and code % 2 else character


class Oracle:
    """Knows which texts a grammar accepts, and which are the beginning of such a text."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._may_be_empty = _derives(rules, lambda leaf: leaf == Text(""))
        self._is_productive = _derives(rules, lambda _: True)

    def derives_nothing(self) -> bool:
        return not self._is_productive(Ref("root"))

    def repeats_nothing_forever(self) -> bool:
        return any(
            isinstance(node, Rep) and node.most is None and self._may_be_empty(node.item)
            for body in self._rules.values()
            for node in _nodes(body)
        )

    def judge(self, text: str) -> tuple[bool, int]:
        """Return whether the text is accepted, and how many characters of it are a beginning."""
        self._text, self._known, self._furthest = text, {}, 0
        ends = self._ends(Ref("root"), 0)
        return len(text) in ends, max(self._furthest, *ends, 0)

    def sentence(self, random: Random) -> str | None:
        """Return an accepted text; `None` if chance led too deep."""
        try:
            return "".join(self._derived(Ref("root"), random, 40))
        except _TooDeepError:
            return None

    def _ends(self, node: Node, start: int) -> frozenset[int]:
        """Return where a text that begins at `start` and is derived from the node may end."""
        if not self._is_productive(node):
            return frozenset()
        key = node, start
        if key not in self._known:
            self._known[key] = frozenset(self._find_ends(node, start))
        return self._known[key]

    def _find_ends(self, node: Node, start: int) -> set[int]:
        match node:
            case Class():
                return {start + 1} if self._is_next(node, start) else set()
            case Ref(name):
                return set(self._ends(self._rules[name], start))
            case Alt(options):
                return {end for option in options for end in self._ends(option, start)}
            case Rep(item, least, most):
                return self._repeated_ends(item, start, least, most)
            case Text(text):
                items = tuple(Class(((character, character),)) for character in text)
            case Seq(items):
                pass
        ends = {start}
        for item in items:
            ends = {end for middle in ends for end in self._ends(item, middle)}
        return ends

    def _repeated_ends(self, item: Node, start: int, least: int, most: int | None) -> set[int]:
        ends, found = {start}, set()
        for count in range(least if most is None else most):
            found |= ends if count >= least else set()
            ends = {end for middle in ends for end in self._ends(item, middle)}
        while most is None and not ends <= found:
            found |= ends
            ends = {end for middle in ends for end in self._ends(item, middle)}
        return found | ends

    def _is_next(self, characters: Class, at: int) -> bool:
        self._furthest = max(self._furthest, at)
        return at < len(self._text) and characters.holds(self._text[at])

    def _derived(self, node: Node, random: Random, depth: int) -> Iterator[str]:
        if depth == 0 or not self._is_productive(node):
            raise _TooDeepError
        match node:
            case Text(text):
                yield text
            case Class(ranges, _):
                edges = [edge for pair in ranges for edge in pair]
                yield random.choice([c for c in [*edges, *_SAMPLES] if node.holds(c)])
            case Ref(name):
                yield from self._derived(self._rules[name], random, depth - 1)
            case Seq(items):
                for item in items:
                    yield from self._derived(item, random, depth - 1)
            case Alt(options):
                productive = [option for option in options if self._is_productive(option)]
                yield from self._derived(random.choice(productive), random, depth - 1)
            case Rep(item, least, most):
                more = 2 if most is None else min(2, most - least)
                count = least + random.randint(0, more if self._is_productive(item) else 0)
                for _ in range(count):
                    yield from self._derived(item, random, depth - 1)


class _TooDeepError(Exception):
    pass


def _derives(rules: Mapping[str, Node], leaf: Callable[[Node], bool]) -> Callable[[Node], bool]:
    """Return whether a node derives something made of leaves for which `leaf` holds."""
    names: set[str] = set()

    def holds(node: Node) -> bool:
        match node:
            case Ref(name):
                return name in names
            case Seq(items):
                return all(map(holds, items))
            case Alt(options):
                return any(map(holds, options))
            case Rep(item, least, _):
                return least == 0 or holds(item)
        return leaf(node)

    for _ in rules:  # one more is found each time, or none ever
        names |= {name for name, body in rules.items() if holds(body)}
    return holds


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    match node:
        case Seq(inner) | Alt(inner):
            for each in inner:
                yield from _nodes(each)
        case Rep(item):
            yield from _nodes(item)
