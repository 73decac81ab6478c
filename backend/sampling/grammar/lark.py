"""Grammars in llguidance's variant of Lark."""

from dataclasses import dataclass

# Forced tokens may be markers that llguidance 1.9.1 refuses a step later (its issue 366).
_HEADER = '%llguidance {"no_forcing": true}'


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A grammar for llguidance, apart, so that it can become a part of a larger one.

    Attributes:
        start: The expression for a whole reply.
        definitions: One per line, whatever `start` needs.
    """

    start: str
    definitions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The grammar on its own."""
        return "\n".join([_HEADER, f"start: {self.start}", *self.definitions, ""])
