"""Free text in a grammar: whatever a model writes, up to the texts at which that ends."""

from collections.abc import Iterable, Sequence

from backend.sampling.grammar.writer import GrammarWriter, chain, escaped, sequence


class FreeText:
    """Text of any kind, with any tokens, in which some texts do not occur.

    Those cannot be spelled out either: whoever reads the reply reads text.

    Attributes:
        characters: The terminal of a part without tokens.
    """

    def __init__(
        self, writer: GrammarWriter, ends: Sequence[str], *, never_first: str = ""
    ) -> None:
        """Define the text.

        Args:
            writer: Takes the definitions.
            ends: The texts that do not occur in it.
            never_first: A regular expression; the text does not begin with it, whitespace aside.
        """
        self._writer = writer
        self.characters = writer.terminal(_characters(ends, never_first))
        others = other_token(ends, writer)
        self._passage = others and writer.rule(f"({self.characters}? {others})*")

    @property
    def alone(self) -> str:
        """The expression of text up to the end of the reply."""
        return chain(self._passage, f"{self.characters}?")

    @property
    def after(self) -> str:
        """The expression of the text after calls."""
        return self.alone

    def before(self, end: str) -> str:
        """Return the expression of text that ends with one of the ends."""
        first, *rest = self._writer.pieces(end)
        if not isinstance(first, str):
            return chain(self.alone, sequence((first, *rest)))
        head = self._writer.terminal(f"{self.characters}? /{escaped(first)}/")
        # A token ends the text by itself, but a text must not go on after its end.
        head = head if rest else self._writer.lazy_rule(head)
        return chain(self._passage, head, sequence(rest))


def other_token(ends: Iterable[str], writer: GrammarWriter) -> str:
    """Return the expression of any marker that none of the ends has first; nothing without any."""
    firsts = {
        next((piece for piece in writer.pieces(end) if isinstance(piece, int)), None)
        for end in ends
    }
    vocabulary = writer.vocabulary
    others = {*vocabulary.markers.values()} - vocabulary.eos_ids - firsts
    return f"<[{','.join(_ranges(others))}]>" if others else ""


def _characters(ends: Iterable[str], never_first: str) -> str:
    """Return the terminal of text without tokens."""
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
