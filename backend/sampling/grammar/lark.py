"""Grammars in llguidance's variant of Lark."""

from dataclasses import dataclass

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
