"""The formats of thoughts and of tool calls, their evidence, and how a grammar writes them."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Self

from backend.formats.dialects import (
    ARGUMENTS,
    JSON_CALLS,
    KEY,
    MAYBE_LINE,
    VALUE,
    Citations,
    Dialect,
    Messages,
    NamedJson,
    Objects,
    Reading,
    Tags,
    Template,
    split_at,
    text_of,
)

_SPECIAL = re.compile(r"<[|｜].*>|<.*[|｜]>")


# Appended to the name of a format to override all evidence.
FORCED = "!"


@dataclass(frozen=True, slots=True)
class FormatEvidence:
    """Evidence of a model's format.

    Attributes:
        vocabulary: All tokens, including added ones.
        written_call: The template's rendering of `EXAMPLE_CALL`; empty if unknown.
        is_told_here: Whether it is this backend that tells the model how to call.
        tool_parser: A name to use if the other evidence is inconclusive; with `FORCED` appended, it
            overrides the evidence.
        reasoning_parser: A name that overrides the evidence.
    """

    vocabulary: Collection[str]
    chat_template: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    written_call: str = ""
    is_told_here: bool = False

    def has(self, marker: str) -> bool:
        """Tell whether a marker is in the template, or is a token."""
        return marker in self.chat_template or marker in self.vocabulary

    def find(self, marker: re.Pattern[str]) -> str:
        """Return the group of a marker in the template or in a token; empty if there is none."""
        if found := marker.search(self.chat_template):
            return found[1]
        tokens = (marker.fullmatch(token) for token in self.vocabulary)
        return next((found[1] for found in tokens if found), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """Texts that must be present or absent: in the template, as tokens, or as either."""

    template: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def fits(self, evidence: FormatEvidence) -> bool:
        """Tell whether the evidence matches completely."""
        template, vocabulary = evidence.chat_template, evidence.vocabulary
        return (
            all(text in template for text in self.template)
            and all(token in vocabulary for token in self.vocabulary)
            and all(text in template or text in vocabulary for text in self.anywhere)
            and not any(text in template for text in self.absent)
        )


def in_template(*texts: str) -> Clue:
    """Return the clue that the template contains these texts."""
    return Clue(template=texts)


def as_tokens(*tokens: str) -> Clue:
    """Return the clue that the vocabulary contains these tokens."""
    return Clue(vocabulary=tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """The section of an answer, in formats whose calls have their own section.

    Attributes:
        begin: The text before the answer.
        end: The text between it and the calls.
        may_be_open: Whether a prompt may end inside it.
        closes: Whether the same text ends it if no calls follow.
    """

    begin: str
    end: str
    may_be_open: bool = False
    closes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One way to write calls.

    Attributes:
        dialect: Syntax of the arguments and, unless `call` overrides it, of calls.
        opener: The text before the calls; it may be the beginning of the first call.
        begin: The text between the opener and the first call.
        separator: The text between two calls.
        end: The text after the calls.
        needs: A marker that models must have to write this way.
        lacks: A marker that models must not have to write this way.
        is_lead: Whether the opener counts only at the start of the text.
        is_block: Whether the calls after the opener form one block. Otherwise each call has an
            opener, and text may replace the separator between them.
        is_lapse: Whether it is allowed only where text is, such as a mistake of models.
    """

    dialect: Dialect
    opener: str
    _: KW_ONLY
    begin: Template = ()
    call: Template = ()
    separator: Template = ()
    end: str = ""
    needs: str = ""
    lacks: str = ""
    is_lead: bool = False
    is_block: bool = True
    is_lapse: bool = False

    @property
    def first_call(self) -> Template:
        """The text from the opener to the end of the first call."""
        call = self.call or self.dialect.call
        has_opener = text_of(call[:1]).startswith(self.opener)
        return (*(() if has_opener else (self.opener,)), *self.begin, *call)


def calls_between(opener: str, closer: str, dialect: Dialect, *, lacks: str = "") -> Frame:
    """Return the frame of calls on separate lines, each between two markers."""
    call = ("\n", *dialect.call, f"\n{closer}")
    separator = (f"\n{opener}",)
    return Frame(dialect, opener, call=call, separator=separator, lacks=lacks, is_block=False)


def calls_inside(opener: str, closer: str, dialect: Dialect) -> Frame:
    """Return the frame of the same calls, each on the line of its markers."""
    call, separator = (*dialect.call, closer), (MAYBE_LINE, opener)
    return Frame(dialect, opener, call=call, separator=separator, is_block=False)


def block_between(opener: str, closer: str, dialect: Dialect) -> Frame:
    """Return the frame of calls that follow each other on lines between two markers."""
    return Frame(dialect, opener, call=("\n", *dialect.call), end=f"\n{closer}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Format:
    """Properties shared by formats of both kinds.

    Attributes:
        aliases: Names used by vLLM, SGLang and LocalAI.
        clues: Alternative evidence; one match is enough.
        tokens: Texts other than the markers that may be special tokens.
        citations: The tags of citations, in families that cite.
        boxes: Marks around a part of an answer that is shown in a box; never shown themselves.
        own: In place of clues: finds the format of one checkpoint, whose markers the evidence
            spells.
    """

    name: str
    aliases: tuple[str, ...] = ()
    clues: tuple[Clue, ...] = ()
    tokens: tuple[str, ...] = ()
    citations: Citations | None = None
    boxes: tuple[str, ...] = ()
    own: Callable[[FormatEvidence], Self | None] | None = None

    def is_called(self, name: str) -> bool:
        """Tell whether a name refers to this format."""
        normal = name.strip().lower().replace("-", "_")
        return normal in (self.name, *self.aliases)

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
        first_frames: Texts dropped at the start of an answer, and elsewhere text.
        notes: Texts inside thoughts that are dropped.
        later_starts: Texts that open a thought even after content; elsewhere only the first part of
            a reply, or one after a call or a frame, is a thought, and a start is text.
        first_starts: Texts that open a thought where no content precedes them, and elsewhere are
            text: starts whose token the model left out.
        bridge: The text after a thought, in replies framed by messages.
        answer: The text before an answer, with or without a thought, in replies framed by messages.
        parting: The words before the end of a thought that has exhausted its budget, as trained or
            recommended by the family's makers.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    first_frames: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    later_starts: tuple[str, ...] = ()
    first_starts: tuple[str, ...] = ()
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
        name_lead: A text, perhaps an opener, that makes a lead of every offered name before it, at
            the start of a frame too; empty for none.
        closers: Texts that end a call or a block of calls; the first is the default.
        leaks: Meaningless texts that models write after calls by mistake.
        readings: Dialects for reading calls; empty for models without calls.
        lapses: Readings between texts that are no markers: grammars let prose contain them.
        frames: The ways in which a grammar lets a model write calls.
        most_calls: Limit of calls in a reply, if there is one.
        around: The text around calls, if it is not free: messages, some of which are calls, or
            an answer section before the calls.
        without_grammar: Why no grammar can be made, in formats without frames.
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
    lapses: tuple[Reading, ...] = ()
    frames: tuple[Frame, ...] = ()
    most_calls: int | None = None
    around: Messages | Section | None = None
    without_grammar: str = ""
    id_chars: int = 0
    ends_thought: bool = True
    has_drafts: bool = True
    is_quotable: bool = True
    owns_reply: bool = False

    def readings_at(self, opener: str) -> tuple[Reading, ...]:
        """Return the readings of the text after an opener or a lead."""
        return tuple(each for each in self.readings if opener in (each.openers or (opener,)))

    def fallback_at(self, opener: str) -> Reading:
        """Return the reading of a text that begins like none of the others; its own is first."""
        fallbacks = [each for each in self.readings_at(opener) if not each.begins]
        return min(fallbacks, key=lambda reading: opener not in reading.openers)

    @property
    def names_lead_json(self) -> bool:
        """Whether an offered name before `name_lead` begins a call whose arguments are JSON."""
        return bool(self.name_lead) and isinstance(
            self.fallback_at(self.name_lead).dialect, NamedJson
        )

    def begins_with_name(self, opener: str) -> bool:
        """Tell whether an opener is a name, and the beginning of its arguments in JSON."""
        is_own = opener in (*self.openers, *self.leads)
        return self.names_lead_json and opener.endswith(self.name_lead) and not is_own

    @property
    def object_leads(self) -> tuple[str, ...]:
        """The leads that begin calls as JSON objects, which may stand in a fence."""
        return tuple(
            lead
            for lead in self.leads
            if any(isinstance(reading.dialect, Objects) for reading in self.readings_at(lead))
        )

    @property
    def inner_ends(self) -> tuple[str, ...]:
        """The last tags of calls in tags, and of their arguments."""
        return _inner_ends(self.readings)

    @property
    def lapse_marks(self) -> tuple[str, ...]:
        """The texts around the calls of lapses."""
        return tuple(text for each in self.lapses for text in (*each.openers, *each.ends))

    @property
    def strays(self) -> frozenset[str]:
        """Markers that are special tokens by their form: alone, they are nothing for a reader.

        So are those that contain such a token. The texts of lapses are no tokens.
        """
        lapses = frozenset(self.lapse_marks)
        marks = (mark for mark in (*self.openers, *self.closers) if mark not in lapses)
        return _strays(tuple(marks), self.tokens)

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


@lru_cache(maxsize=256)
def _inner_ends(readings: tuple[Reading, ...]) -> tuple[str, ...]:
    calls = (each.dialect for each in readings if isinstance(each.dialect, Tags))
    ends = (
        text_of(end).strip()
        for tags in calls
        for end in (split_at(tags.call, ARGUMENTS)[1], split_at(tags.parameter, VALUE)[1])
        if KEY not in end
    )
    return tuple(dict.fromkeys(ends))


@lru_cache(maxsize=256)
def _strays(marks: tuple[str, ...], tokens: tuple[str, ...]) -> frozenset[str]:
    return frozenset(
        mark for mark in marks if _SPECIAL.fullmatch(mark) or any(token in mark for token in tokens)
    )


# The beginnings of calls without markers.
_BARE_LEADS = ("{", "[")


@lru_cache  # Bounded: each load makes the formats of its checkpoint anew.
def with_bare_calls(tool_format: ToolFormat, others: tuple[Reading, ...] = ()) -> ToolFormat:
    """Return a format that also reads JSON calls without markers: all models lapse into these.

    Bare calls of a format's own, and a format that frames the whole reply, stay as they are. A
    format with JSON also reads calls between the markers of `others`, except for its own.
    """
    if not tool_format.readings or tool_format.owns_reply:
        return tool_format
    tool_format = replace(tool_format, lapses=(*tool_format.lapses, *_foreign(tool_format, others)))
    # A scanner would find a lead inside a marker first.
    marks = (*tool_format.openers, *tool_format.closers, *tool_format.leaks)
    unread = [lead for lead in _BARE_LEADS if lead not in tool_format.leads]
    leads = tuple(lead for lead in unread if not any(lead in mark[1:] for mark in marks))
    bare = (Reading(JSON_CALLS, openers=leads),) if leads else ()
    lapses = tool_format.lapses
    # The end of a fence may be that of any other.
    ends = (end for each in lapses for end in each.ends if not end.startswith("`"))
    return replace(
        tool_format,
        openers=(*tool_format.openers, *(text for each in lapses for text in each.openers)),
        closers=tuple(dict.fromkeys((*tool_format.closers, *ends))),
        leads=(*tool_format.leads, *leads),
        readings=(*tool_format.readings, *lapses, *bare),
    )


def _foreign(tool_format: ToolFormat, others: tuple[Reading, ...]) -> Iterator[Reading]:
    """Yield the readings between the markers of other families that are no part of its own."""
    has_json = any(isinstance(each.dialect, Objects | NamedJson) for each in tool_format.readings)
    own = (*tool_format.openers, *tool_format.closers, *tool_format.leaks, *tool_format.tokens)
    lapses = (text for each in tool_format.lapses for text in each.openers)
    texts = (*own, *lapses)
    for reading in others if has_json else ():
        if not any(opener in text for opener in reading.openers for text in texts):
            yield reading


NO_REASONING = ReasoningFormat(name="none")
NO_TOOLS = ToolFormat(name="none", without_grammar="the model writes no calls")
