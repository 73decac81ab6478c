"""The tags of calls, as a reader looks for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backend.output.readers.patterns import Pattern
from backend.output.readers.values.schema import JsonTypes, ParameterTypes
from backend.output.readers.values.typed_value import ValueWriter

ELEMENT_NAME = "{tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedDialect:
    """The tags of a dialect.

    Attributes:
        call: The beginning of a call, up to its arguments.
        call_begin: The text that every call begins with.
        call_end: The end of a call.
        parameter: The beginning of an argument, up to the first character of its value.
        parameter_begin: The text that every argument begins with.
        value_begin: The tag before a value, where it is not that of the argument.
        parameter_end: The end of an argument; `ELEMENT_NAME` stands for the name of its tag.
        block_ends: Texts that end a block of calls, in formats that have blocks.
        other_parameter_ends: Texts that models write for the end of an argument by mistake.
        other_call_ends: Texts that they write for the end of a call.
        pads_values: Whether a newline at each end of a value belongs to the tags.
        verbatim: Marks that may stand around a value, in which nothing is a tag.
        requires_ends: Whether a parameter without an end is none: where values may hold tags
            that look like those of parameters.
        types: The types of a value by what its tag says; elsewhere the schema tells.
        make_value: Makes the converter of a value, where its text is not all.
        json_begin: The tag before a JSON object that stands for all arguments, where there is one.
        json_end: The tag after it.
    """

    call: Pattern
    call_begin: str
    call_end: str
    parameter: Pattern
    parameter_begin: str
    parameter_end: str
    value_begin: str = ""
    block_ends: tuple[str, ...] = ()
    other_parameter_ends: tuple[str, ...] = ()
    other_call_ends: tuple[str, ...] = ()
    pads_values: bool = False
    verbatim: tuple[str, str] = ("", "")
    requires_ends: bool = False
    types: Mapping[str, JsonTypes] = field(default_factory=dict)
    make_value: Callable[[ParameterTypes, str], ValueWriter] | None = None
    json_begin: Pattern | None = None
    json_end: str = ""

    def may_end_with(self, rest: str) -> bool:
        """Tell whether a text is the beginning of a text that ends a call."""
        ends = (*self.call_ends, *self.block_ends, self.json_end)
        return any(end.startswith(rest) for end in ends)

    @property
    def call_ends(self) -> tuple[str, ...]:
        """Texts that end a call, the right one first."""
        return (self.call_end, *self.other_call_ends)
