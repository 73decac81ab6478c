"""Free text in a grammar: anything a model writes, up to certain end texts."""

from collections.abc import Iterable, Sequence

from backend.sampling.grammar.writer import GrammarWriter, chain, escaped, sequence


class FreeText:
    """Text of any tokens that does not contain certain texts.

    These may not be spelled out either, because readers of the reply look at text.

    Attributes:
        characters: Name of the terminal for text without marker tokens.
    """

    def __init__(
        self, writer: GrammarWriter, ends: Sequence[str], *, never_first: str = ""
    ) -> None:
        """Define the text.

        Args:
            writer: Collects the definitions.
            ends: Texts that do not occur in it.
            never_first: A regular expression; the text does not begin with it, ignoring whitespace.
        """
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
    """Return the terminal of text without marker tokens."""
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
