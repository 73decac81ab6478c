"""The tags of calls, in the form that the reader needs."""

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
        call_begin: The text that begins every call.
        call_ends: Texts that end a call, the correct one first.
        parameter: The beginning of an argument, up to the first character of its value.
        parameter_begin: The text that begins every argument.
        value_begin: The tag before a value, if it differs from the argument's.
        parameter_end: The end of an argument; `ELEMENT_NAME` represents the name of its tag.
        block_ends: Texts that end a block of calls, in formats with blocks.
        other_parameter_ends: Texts that models mistakenly write for the end of an argument.
        pads_values: Whether newlines around a value belong to the tags.
        verbatim: Optional marks around a value; text between them contains no tags.
        requires_ends: Whether a parameter must have its end, because values may contain tags that
            look like those of parameters.
        types: Types of values as spelled in tags; otherwise the schema decides.
        make_value: Makes the converter of a value, if it is more than its text.
        json_begin: The tag before a JSON object that replaces all arguments, if any.
        json_end: The tag after it.
    """

    call: Pattern
    call_begin: str
    call_ends: tuple[str, ...]
    parameter: Pattern
    parameter_begin: str
    parameter_end: str
    value_begin: str = ""
    block_ends: tuple[str, ...] = ()
    other_parameter_ends: tuple[str, ...] = ()
    pads_values: bool = False
    verbatim: tuple[str, str] = ("", "")
    requires_ends: bool = False
    types: Mapping[str, JsonTypes] = field(default_factory=dict)
    make_value: Callable[[ParameterTypes, str], ValueWriter] | None = None
    json_begin: Pattern | None = None
    json_end: str = ""

    def may_end_with(self, rest: str) -> bool:
        """Tell whether a text is a prefix of a text that ends a call."""
        ends = (*self.call_ends, *self.block_ends, self.json_end)
        return any(end.startswith(rest) for end in ends)
