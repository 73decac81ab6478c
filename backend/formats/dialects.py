"""The call syntaxes that model families share. Each template is the text that a model writes.

A reader accepts more than its dialect says: spaces, other quotes, missing ends. A grammar
allows no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from backend.formats.template import ARGUMENTS, QUOTED_NAME, Template


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Calls as JSON objects, `{"name": …, "arguments": {…}}`.

    Attributes:
        call: One call; the keys before the name, the arguments and the id are read from it.
    """

    call: Template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedJson:
    """Calls whose name stands before arguments in JSON, `f[ARGS]{…}`.

    Attributes:
        calls: The ways to write a call: the first is written, all are read. A text that all
            begin with begins a call.
        is_list: Whether calls stand in a list.
    """

    calls: tuple[Template, ...]
    is_list: bool = False

    @property
    def call(self) -> Template:
        """The usual way to write a call."""
        return self.calls[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tags:
    """Calls in tags with raw values between them, `<parameter=a>…</parameter>`.

    Attributes:
        call: One call.
        parameter: One argument. Newlines on both sides of the value belong to the tags.
        types: The JSON types as the tags write them, where they do.
        verbatim: Marks that may stand around a value; nothing between them is a tag.
        special: Characters that stand in no value without these marks.
        requires_ends: Whether a value never lacks its end: where values may hold tags that look
            like those of arguments.
        escapes_attributes: Whether names in attributes are escaped as in XML.
        mark: A text before each tag, where values are nested elements.
        misspelling: A text that models write before the name of such an element by mistake.
        object: All arguments as one JSON object, where there are tags for that.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Literals:
    """Calls in the notation of a programming language, `f(a="x", n=2)`.

    Attributes:
        call: One call.
        argument: One argument.
        comma: The text between two arguments, and between two items.
        colon: The text between a key inside of a value and its value.
        quotes: Texts around a string: the first is written. One that another begins with comes
            after it.
        constants: The ways to write true, false and null, with the JSON for each.
        has_escapes: Whether backslashes in strings mean what they mean in Python.
        has_bare_text: Whether strings and keys in values may lack their quotes.
        has_positions: Whether arguments may lack their names where the schema tells their order.
        sorts_names: Whether arguments and keys come in the order of the alphabet.
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


@dataclass(frozen=True, slots=True, eq=False)
class Markup:
    """A text that means nothing, and ends what it stands in."""

    text: str

    @property
    def call(self) -> Template:
        """Nothing: there is no call in it."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Messages:
    """Replies that are messages, each with a header that tells who it is for.

    Attributes:
        start: Begins a header.
        message: Ends a header and begins a body.
        channel: Stands before the channel of a message, where there are channels.
        constrain: Stands before the type of a body, where headers tell types.
        channels: The channels, and whether their messages are thoughts.
        roles: The senders that a header may name.
        self_name: The recipient of thoughts, where they have one.
        people: Recipients that are no tools.
        namespace: A prefix of the names of tools.
        words: Further words in headers.
        ends: Texts that end a message.
        last_ends: Those that end the reply as well.
        heads: The headers of messages that may come before a call.
        answer: The header of an answer.
        calls: The calls that stand in bodies, with their openers; without them, a recipient is
            the name of a tool, and the body is its arguments in JSON.
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
        """Nothing: calls stand in messages."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """A dialect in which calls are read, and where.

    Attributes:
        openers: The openers after which it may come; without any, all.
        begins: Texts that it begins with; without any, it is read when no other fits.
        end: The text that ends a block of calls.
        other_ends: Further texts that do.
    """

    dialect: Dialect
    openers: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    end: str = ""
    other_ends: tuple[str, ...] = ()


def json_object(name_key: str, arguments_key: str) -> Objects:
    """Return calls as objects with two keys."""
    return Objects((f'{{"{name_key}": ', QUOTED_NAME, f', "{arguments_key}": ', ARGUMENTS, "}"))


JSON_CALLS = json_object("name", "arguments")
