"""The formats of thoughts and of tool calls."""

from dataclasses import dataclass

from backend.formats.dialects import Reading
from backend.formats.evidence import Clue, FormatEvidence
from backend.formats.grammar import CallGrammar


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Format:
    """The properties of formats of both kinds.

    Attributes:
        name: Our name for it.
        aliases: The names that vLLM, SGLang and LocalAI have for it.
        clues: Evidence, any of which is enough.
        tokens: Texts that a tokenizer may know as special tokens, besides the markers.
    """

    name: str
    aliases: tuple[str, ...] = ()
    clues: tuple[Clue, ...] = ()
    tokens: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Tell whether a name means this format."""
        normal = name.strip().lower().replace("-", "_")
        return normal in (self.name, *self.aliases)

    def fits(self, evidence: FormatEvidence) -> bool:
        """Tell whether a model writes like this."""
        return any(clue.fits(evidence) for clue in self.clues)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReasoningFormat(_Format):
    """The markers around a thought; empty for models without thoughts.

    Attributes:
        starts: Texts that open a thought; the first is the usual one.
        ends: Texts that close it.
        frames: Texts around answers, or inside of thoughts, that are left out.
        bridge: The text after a thought, where messages frame a reply.
        answer: The text before an answer, thought or not, where messages frame a reply.
        parting: The words before the end of a thought that has used up its budget, as the family
            was trained or its makers recommend.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    bridge: str = ""
    answer: str = ""
    parting: str = ""

    @property
    def start(self) -> str:
        """The usual text that opens a thought, or nothing."""
        return self.starts[0] if self.starts else ""

    @property
    def end(self) -> str:
        """The usual text that closes a thought, or nothing."""
        return self.ends[0] if self.ends else ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToolFormat(_Format):
    """A tool-call format.

    Attributes:
        openers: Texts at which the router hands over to a reader, wherever they stand.
        leads: Texts at which it does so only where content begins, whitespace aside.
        closers: Texts that end a call or a block of them; the first is the usual one.
        leaks: Texts that models write after calls by mistake, and that mean nothing.
        readings: The dialects in which calls are read; none for models without calls.
        grammar: The ways in which calls are written.
        without_grammar: The reason, if there is no grammar.
        id_chars: The length of the alphanumeric ids that the family's templates demand; zero if
            any id does.
        ends_thought: Whether a call may begin inside a thought, and so end it; else an opener
            there is text.
        has_drafts: Whether a call in a thought that is closed later is a part of the thought.
        is_quotable: Whether a model can write the openers without calling, so that they are
            text in code. Special tokens cannot be quoted.
        owns_reply: Whether the format frames the whole reply, thoughts and answers too: its
            reader then begins with the reply, without an opener, and hands out every delta.
            One that ends leaves the rest of the reply to the router.
    """

    openers: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
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
    def opener(self) -> str:
        """The usual text that opens a call, or nothing."""
        return next(iter((*self.openers, *self.leads)), "")

    @property
    def closer(self) -> str:
        """The usual text that closes a call, or nothing."""
        return self.closers[0] if self.closers else ""


NO_REASONING = ReasoningFormat(name="none")
NO_TOOLS = ToolFormat(name="none", without_grammar="the model writes no calls")
