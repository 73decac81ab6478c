"""Call syntaxes shared by model families. Each template is the text that a model writes.

Readers accept more than the dialect says: spaces, other quotes, missing ends. Grammars allow
nothing more.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import TypeAlias


class Slot(Enum):
    """An open part of a call; `TYPE` is that of the value, as the dialect spells it."""

    NAME = auto()
    QUOTED_NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    VALUE = auto()
    TYPE = auto()
    INDEX = auto()


@dataclass(frozen=True, slots=True)
class Maybe:
    """A part that may be missing."""

    template: "Template"


@dataclass(frozen=True, slots=True)
class Characters:
    """Text that matches a regular expression, in syntax common to Python and llguidance."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Id:
    """The id of the call."""

    template: "Template"


Part: TypeAlias = str | Slot | Maybe | Characters | Id
Template: TypeAlias = tuple[Part, ...]

NAME, QUOTED_NAME, ARGUMENTS = Slot.NAME, Slot.QUOTED_NAME, Slot.ARGUMENTS
KEY, VALUE, TYPE, INDEX = Slot.KEY, Slot.VALUE, Slot.TYPE, Slot.INDEX
MAYBE_LINE, MAYBE_SPACE = Maybe(("\n",)), Maybe((" ",))


def split_at(template: Template, slot: Slot) -> tuple[Template, Template]:
    """Return the parts before and after a slot."""
    place = template.index(slot)
    return template[:place], template[place + 1 :]


def text_of(template: Template) -> str:
    """Return the fixed text of a template, without open and optional parts."""
    return filled(template, {})


def filled(template: Template, texts: Mapping[Part, str]) -> str:
    """Return the text of a template with these open parts, without others."""
    return "".join(part if isinstance(part, str) else texts.get(part, "") for part in template)


# Keys of an object around name and arguments, or of the name itself.
NESTING_KEYS = ("function", "function_call", "tool_call")
NAME_KEYS = ("name", *NESTING_KEYS)
# Key of a list of calls, in an object around it.
LIST_KEY = "tool_calls"
# Keys of members that may come before the name.
KEYS_BESIDE = ("type", "id", "index")


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Calls as JSON objects, `{"name": …, "arguments": {…}}`.

    Attributes:
        call: One call; its keys for name, arguments and id are derived from it.
    """

    call: Template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedJson:
    """Calls with the name before JSON arguments, `f[ARGS]{…}`.

    Attributes:
        calls: The ways to write a call: the first is written, all are read. Their common beginning
            marks a call.
        is_list: Whether calls are written as a list.
    """

    calls: tuple[Template, ...]
    is_list: bool = False

    @property
    def call(self) -> Template:
        """The default way to write a call."""
        return self.calls[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tags:
    """Calls in tags around raw values, `<parameter=a>…</parameter>`.

    Attributes:
        parameter: One argument. Newlines around the value belong to the tags.
        types: JSON types as spelled in the tags, if they are.
        verbatim: Optional marks around a value; text between them contains no tags.
        special: Characters that a value may contain only between these marks.
        requires_ends: Whether a value must have its end tag, because values may contain tags
            that look like those of arguments.
        escapes_attributes: Whether names in attributes are escaped as in XML.
        mark: A text before each tag, for values that are nested elements.
        misspelling: A text that models wrongly write before the name of such an element.
        object: All arguments as one JSON object, in dialects with tags for that.
        type_tag: An optional tag with the JSON type before that of the value: read, not written.
        other_parameters: Arguments as models mistakenly write them in place of one that is due.
        other_call_ends: Texts that they write for the end of a call.
    """

    call: Template
    parameter: Template
    types: Mapping[str, str] = field(default_factory=dict)
    verbatim: tuple[str, str] = ("", "")
    special: str = ""
    requires_ends: bool = False
    escapes_attributes: bool = False
    mark: str = ""
    misspelling: str = ""
    object: Template = ()
    type_tag: Template = ()
    other_parameters: tuple[Template, ...] = ()
    other_call_ends: tuple[str, ...] = ()

    @property
    def pads_values(self) -> bool:
        """Whether newlines around a value belong to the tags."""
        begin, end = split_at(self.parameter, VALUE)
        return text_of(begin).endswith("\n") and text_of(end).startswith("\n")

    @property
    def is_inline(self) -> bool:
        """Whether arguments follow each other on a line."""
        return not text_of(split_at(self.parameter, VALUE)[1]).endswith("\n")

    def spelled(self, name: str) -> str:
        """Return a name as tags contain it."""
        if not self.escapes_attributes:
            return name
        return name.replace("&", "&amp;").replace('"', "&quot;")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Literals:
    """Calls in the syntax of a programming language, `f(a="x", n=2)`.

    Attributes:
        comma: The text between arguments, and between items.
        colon: The text between key and value inside a value.
        quotes: Texts around a string; the first is written. A text that is a prefix of another
            comes after it.
        constants: Spellings of true, false and null, each with its JSON value.
        has_escapes: Whether strings have Python's backslash escapes.
        has_bare_text: Whether strings, and keys inside values, may lack quotes.
        has_positions: Whether arguments may lack names if the schema gives their order.
        sorts_names: Whether arguments and keys are in alphabetical order.
        before: Texts that may stand before a call, in this order: read, not written. After one
            with a bracket the call may have another at its end.
        is_script: Whether the calls are lines of a program, which may assign, comment and print.
    """

    call: Template
    argument: Template
    comma: str
    colon: str
    quotes: tuple[str, ...]
    constants: Mapping[str, tuple[str, ...]]
    has_escapes: bool = False
    has_bare_text: bool = False
    has_positions: bool = False
    sorts_names: bool = False
    before: tuple[str, ...] = ()
    is_script: bool = False


@dataclass(frozen=True, slots=True)
class Citations:
    """Tags around words that a source supports, `<co>words</co: 0:[1]>`; never shown.

    Attributes:
        begin: The beginning of the first tag, which may state the sources.
        end: The beginning of the last tag, which states them.
    """

    begin: str
    end: str


@dataclass(frozen=True, slots=True, eq=False)
class Markup:
    """Meaningless text that ends its surroundings."""

    text: str

    @property
    def call(self) -> Template:
        """Empty: it contains no calls."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Messages:
    """Replies made of messages, each with a header that names its recipient.

    Attributes:
        start: Begins a header.
        message: Ends a header and begins a body.
        channel: Precedes the channel of a message, in formats with channels.
        constrain: Precedes the type of a body, in formats with typed bodies.
        channels: The channels, each with whether its messages are thoughts.
        roles: Senders that a header may name.
        self_name: The recipient of thoughts, if they have one.
        people: Recipients that are not tools.
        namespace: Prefix of tool names.
        ends: Texts that end a message.
        last_ends: Those that also end the reply.
        heads: Headers of messages that may precede a call.
        calls: Calls inside bodies, with their openers; without any, the recipient is the name
            of the tool and the body is its arguments in JSON.
    """

    start: str
    message: str
    channel: str = ""
    constrain: str = ""
    channels: Mapping[str, bool] = field(default_factory=dict)
    roles: tuple[str, ...]
    self_name: str = ""
    people: frozenset[str] = frozenset()
    namespace: str = ""
    words: frozenset[str] = frozenset()
    ends: tuple[str, ...]
    last_ends: tuple[str, ...]
    heads: tuple[str, ...]
    answer: str
    calls: "Reading | None" = None

    @property
    def call(self) -> Template:
        """Empty: calls are inside messages."""
        return ()

    @property
    def header_tokens(self) -> tuple[str, ...]:
        """Special tokens in headers."""
        return tuple(filter(None, (self.channel, self.constrain)))

    @property
    def tokens(self) -> tuple[str, ...]:
        """All special tokens of the frames."""
        return (self.start, self.message, *self.header_tokens, *self.ends)


Dialect: TypeAlias = Objects | NamedJson | Tags | Literals | Markup | Messages


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A dialect for reading calls, and its conditions.

    Attributes:
        openers: Openers that it may follow; empty for any.
        begins: Texts that it begins with; without any, it is the fallback.
        end: The text that ends a block of calls.
    """

    dialect: Dialect
    _: KW_ONLY
    openers: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    end: str = ""
    other_ends: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """All texts that end a block of calls."""
        return tuple(filter(None, (self.end, *self.other_ends)))


def json_object(name_key: str, arguments_key: str) -> Objects:
    """Return calls as objects with these two keys."""
    return Objects((f'{{"{name_key}": ', QUOTED_NAME, f', "{arguments_key}": ', ARGUMENTS, "}"))


JSON_CALLS = json_object("name", "arguments")
