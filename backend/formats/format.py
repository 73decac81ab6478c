"""The formats of thoughts and of tool calls."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from backend.formats.dialects import Reading
from backend.formats.evidence import Clue, FormatEvidence
from backend.formats.grammar import CallGrammar

_SPECIAL = re.compile(r"<[|｜].*>|<.*[|｜]>")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Format:
    """Properties shared by formats of both kinds.

    Attributes:
        aliases: Names used by vLLM, SGLang and LocalAI.
        clues: Alternative evidence; one match is enough.
        tokens: Texts other than the markers that may be special tokens.
        own: In place of clues: finds the format of one checkpoint, whose markers the evidence
            spells.
    """

    name: str
    aliases: tuple[str, ...] = ()
    clues: tuple[Clue, ...] = ()
    tokens: tuple[str, ...] = ()
    own: Callable[[FormatEvidence], Self | None] | None = None

    def is_called(self, name: str) -> bool:
        """Tell whether a name refers to this format."""
        normal = name.strip().lower().replace("-", "_")
        return normal in (self.name, *self.aliases)

    def fits(self, evidence: FormatEvidence) -> bool:
        """Tell whether the evidence points to this format."""
        return self.of(evidence) is not None

    def of(self, evidence: FormatEvidence) -> Self | None:
        """Return the format of a checkpoint, or `None` if the evidence does not point to it."""
        if self.own is not None:
            return self.own(evidence)
        return self if any(clue.fits(evidence) for clue in self.clues) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReasoningFormat(_Format):
    """The markers around a thought; empty for models without thoughts.

    Attributes:
        starts: Texts that open a thought; the first is the default.
        ends: Texts that close it.
        frames: Texts around answers that are dropped.
        notes: Texts inside thoughts that are dropped.
        later_starts: Texts that open a thought even after content; elsewhere only the first part of
            a reply, or one after a call or a frame, is a thought, and a start is text.
        bridge: The text after a thought, in replies framed by messages.
        answer: The text before an answer, with or without a thought, in replies framed by messages.
        parting: The words before the end of a thought that has exhausted its budget, as trained or
            recommended by the family's makers.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    later_starts: tuple[str, ...] = ()
    bridge: str = ""
    answer: str = ""
    parting: str = ""

    @property
    def start(self) -> str:
        """The default text that opens a thought, or an empty string."""
        return self.starts[0] if self.starts else ""

    @property
    def end(self) -> str:
        """The default text that closes a thought, or an empty string."""
        return self.ends[0] if self.ends else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that are not part of thoughts or answers."""
        return (*self.starts, *self.later_starts, *self.ends, *self.frames, *self.notes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToolFormat(_Format):
    """A tool-call format.

    Attributes:
        openers: Texts at which the router hands over to a reader, anywhere.
        leads: Texts at which it does so only at the start of content, ignoring whitespace.
        name_lead: A text that makes a lead of every offered name before it; empty for none.
        closers: Texts that end a call or a block of calls; the first is the default.
        leaks: Meaningless texts that models write after calls by mistake.
        readings: Dialects for reading calls; empty for models without calls.
        grammar: How calls are written.
        without_grammar: Why there is no grammar, if there is none.
        id_chars: Length of the alphanumeric ids that the family's templates require; zero if they
            accept any id.
        ends_thought: Whether a call may begin inside a thought and so end it; otherwise an opener
            there is text.
        has_drafts: Whether a call inside a thought that is closed later belongs to the thought.
        is_quotable: Whether a model can write the openers without calling, so that inside code they
            are text. Special tokens cannot be quoted.
        owns_reply: Whether the format frames the whole reply, including thoughts and answers. Its
            reader then starts with the reply, without an opener, and produces every delta; once it
            ends, the router handles the rest.
    """

    openers: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    name_lead: str = ""
    closers: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()
    grammar: CallGrammar | None = None
    without_grammar: str = ""
    id_chars: int = 0
    ends_thought: bool = True
    has_drafts: bool = True
    is_quotable: bool = True
    owns_reply: bool = False

    @property
    def strays(self) -> frozenset[str]:
        """Markers that are special tokens by their form: alone, they are nothing for a reader."""
        return frozenset(filter(_SPECIAL.fullmatch, (*self.openers, *self.closers)))

    @property
    def own_marks(self) -> tuple[str, ...]:
        """The texts that tell a checkpoint's own format from others of its name."""
        return (*self.openers, *self.closers, *self.tokens) if self.own else ()

    @property
    def opener(self) -> str:
        """The default text that opens a call, or an empty string."""
        return next(iter((*self.openers, *self.leads)), "")

    @property
    def closer(self) -> str:
        """The default text that closes a call, or an empty string."""
        return self.closers[0] if self.closers else ""


NO_REASONING = ReasoningFormat(name="none")
NO_TOOLS = ToolFormat(name="none", without_grammar="the model writes no calls")
