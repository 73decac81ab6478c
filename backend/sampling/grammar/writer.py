"""Builds grammars from text with markers, tokens and named definitions."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from backend.errors import GrammarError
from backend.sampling.grammar.vocabulary import Vocabulary

# Forced tokens may be markers that llguidance 1.9.1 refuses one step later (its issue 366).
_HEADER = '%llguidance {"no_forcing": true}'


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A grammar for llguidance, in parts, so that it can be embedded in a larger one.

    Attributes:
        start: The expression for a whole reply.
        definitions: Everything that `start` needs, one per line.
    """

    start: str
    definitions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The complete grammar as text."""
        return "\n".join([_HEADER, f"start: {self.start}", *self.definitions, ""])


@dataclass(frozen=True, slots=True)
class Expression:
    """A finished part of a grammar."""

    lark: str


# Text to spell out, a token id, or anything else.
Piece: TypeAlias = str | int | Expression


class GrammarWriter:
    """Collects definitions, giving each a name; equal definitions share one."""

    def __init__(self, prefix: str, vocabulary: Vocabulary) -> None:
        """Begin a grammar; grammars to be combined need different prefixes, in lower case."""
        self.vocabulary = vocabulary
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._lines: dict[str, str] = {}
        self._bodies: list[tuple[str, Callable[[], str]]] = []
        self._pieces: dict[str, tuple[Piece, ...]] = {}

    def rule(self, body: str) -> str:
        """Define a parser rule and return its name."""
        return self._define(self._prefix, body)

    def lazy_rule(self, terminal: str) -> str:
        """Define a terminal that ends as soon as possible, and return its name."""
        return self._define(self._prefix, terminal, "[lazy]")

    def terminal(self, body: str) -> str:
        """Define a terminal, which the lexer matches greedily, and return its name."""
        return self._define(self._prefix.upper(), body)

    def rule_of_bits(self, key: str, ways: Callable[[], str]) -> str:
        """Define a rule of `when` with 64 bits, which each reference gives after `::`."""
        return self.recursive_rule(key, ways, "::_")

    def recursive_rule(self, key: str, body: Callable[[], str], parameter: str = "") -> str:
        """Define a rule whose body may refer to itself, and return its name.

        Bodies are written one after another, so that long chains of them need no deep stack.
        """
        if key in self._names:
            return self._names[key]
        before = None if self._bodies else (dict(self._names), dict(self._lines))
        name = self._name(self._prefix, key)
        self._bodies.append((f"{name}{parameter}", body))
        if before:
            self._write_bodies(before)
        return name

    def _write_bodies(self, before: tuple[dict[str, str], dict[str, str]]) -> None:
        """Write the bodies of rules, and of those to which they refer.

        Args:
            before: The names and lines to restore after an error: others may go on with less.
        """
        try:
            for name, body in self._bodies:
                self._lines[name] = f"{name}: {body()}"
        except GrammarError:
            self._names, self._lines = before
            raise
        finally:
            self._bodies.clear()

    def grammar(self, start: str, definitions: Iterable[str] = ()) -> LarkGrammar:
        """Return the grammar that starts with an expression."""
        return LarkGrammar(start, (*self._lines.values(), *definitions))

    def pieces(self, text: str) -> tuple[Piece, ...]:
        """Split a format's text as the model writes it, with markers as tokens."""
        if text not in self._pieces:
            self._pieces[text] = tuple(_split(text, self.vocabulary.markers))
        return self._pieces[text]

    def text(self, text: str) -> str:
        """Return the expression of a format's text."""
        return sequence(self.pieces(text))

    def last_text(self, text: str) -> str:
        """Return the expression of a final text, which an end token may replace."""
        pieces = self.pieces(text)
        return sequence(piece for piece in pieces if piece not in self.vocabulary.eos_ids)

    def _define(self, kind: str, body: str, attribute: str = "") -> str:
        name = self._name(kind, f"{kind}{attribute}: {body}")
        self._lines[name] = f"{name}{attribute}: {body}"
        return name

    def _name(self, kind: str, key: str) -> str:
        return self._names.setdefault(key, f"{kind}{len(self._names)}")


def sequence(pieces: Iterable[Piece]) -> str:
    """Return the expression of consecutive pieces; adjacent texts are joined."""
    written: list[str] = []
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if is_text:
            written.append(quoted("".join(map(str, group))))
        else:
            written += map(_written, group)
    return chain(*written)


def chain(*expressions: str) -> str:
    """Return the concatenation of expressions; skips empty ones."""
    return " ".join(filter(None, expressions))


def alternatives(expressions: Iterable[str]) -> str:
    """Return the expression of any one of these; an empty one stands for empty text."""
    different = [expression or '""' for expression in dict.fromkeys(expressions)]
    return different[0] if len(different) == 1 else f"({' | '.join(different)})"


# A condition on the bits of a rule, and bits.
ALWAYS, NONE_SET = "true", "0x0"


def when(expression: str, condition: str) -> str:
    """Return an alternative of a rule of bits that may be taken under a condition on them."""
    return chain(expression or '""', "%if", condition)


def repeated(expression: str, least: int, most: int | None) -> str:
    """Return an expression repeated `least` to `most` times; `None` means no limit."""
    match least, most:
        case _, 0:
            return ""
        case 1, 1:
            return expression
        case 0, 1:
            return f"({expression})?"
        case 0, None:
            return f"({expression})*"
    return f"({expression}){{{least},{'' if most is None else most}}}"


def quoted(text: str) -> str:
    """Return a text as a quoted terminal; an empty text gives an empty expression."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def escaped(text: str) -> str:
    """Return a text escaped for a regular expression."""
    return "".join(f"\\x{{{ord(character):X}}}" for character in text)


def _written(piece: Piece) -> str:
    return piece.lark if isinstance(piece, Expression) else f"<[{piece}]>"


def _split(text: str, markers: Mapping[str, int]) -> Iterator[Piece]:
    """Yield texts and markers in order; of markers at one position, the longest."""
    while text:
        found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
        begin, _, marker = min((place for place in found if place[2]), default=(len(text), 0, ""))
        if begin:
            yield text[:begin]
        if marker:
            yield markers[marker]
        text = text[begin + len(marker) :]


class FreeText:
    """Text of any tokens that does not contain certain texts.

    These may not be spelled out either, because readers of the reply look at text.

    Attributes:
        characters: Name of the terminal for text without marker tokens.
    """

    def __init__(
        self, writer: GrammarWriter, ends: Sequence[str], *, never_first: str = ""
    ) -> None:
        """Define the text; apart from whitespace, it does not begin like `never_first`."""
        self._writer = writer
        self.characters = writer.terminal(_characters(ends, never_first))
        others = other_token(ends, writer)
        self._passage = others and writer.rule(f"({self.characters}? {others})*")

    @property
    def alone(self) -> str:
        """Expression of text up to the end of the reply."""
        return chain(self._passage, f"{self.characters}?")

    @property
    def after(self) -> str:
        """Expression of the text after calls."""
        return self.alone

    def before(self, end: str) -> str:
        """Return the expression of text that ends with the given end."""
        first, *rest = self._writer.pieces(end)
        if not isinstance(first, str):
            return chain(self.alone, sequence((first, *rest)))
        head = self._writer.terminal(f"{self.characters}? /{escaped(first)}/")
        # A token ends the text on its own; spelled out, the text must not continue after its end.
        head = head if rest else self._writer.lazy_rule(head)
        return chain(self._passage, head, sequence(rest))


def other_token(ends: Iterable[str], writer: GrammarWriter) -> str:
    """Return the expression of any marker but the first ones of ends; empty without any."""
    firsts = {
        next((piece for piece in writer.pieces(end) if isinstance(piece, int)), None)
        for end in ends
    }
    vocabulary = writer.vocabulary
    others = {*vocabulary.markers.values()} - vocabulary.eos_ids - firsts
    return tokens_expression(others)


def tokens_expression(tokens: Iterable[int]) -> str:
    """Return the expression of any one of these tokens; empty without any."""
    ranges = ",".join(_ranges(tokens))
    return f"<[{ranges}]>" if ranges else ""


def _characters(ends: Iterable[str], never_first: str) -> str:
    refused = []
    if spelled := "|".join(map(escaped, ends)):
        refused.append(f"(?s:.*)({spelled})(?s:.*)")
    if never_first:
        refused.append(rf"\s*({never_first})(?s:.*)")
    return " & ".join(["/(?s:.)+/", *(f"~/{pattern}/" for pattern in refused)])


def _ranges(numbers: Iterable[int]) -> list[str]:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def either(
    calls: LarkGrammar, answer: LarkGrammar, lead: str, vocabulary: Vocabulary
) -> LarkGrammar:
    """Return the grammar of either; only an answer follows the answer's own grammar.

    Args:
        calls: At least one call, and nothing else.
        lead: The text that a model writes before an answer; empty for none.
    """
    writer = GrammarWriter("either", vocabulary)
    ways = writer.rule(calls.start), chain(writer.text(lead), writer.rule(answer.start))
    return writer.grammar(alternatives(ways), (*calls.definitions, *answer.definitions))
