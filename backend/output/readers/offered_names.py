"""Names of offered tools, as models write them."""

import re
from typing import Protocol

from backend.output.readers.typed_values import ParameterTypes

# Words of the syntaxes themselves, between an opener and the name of a tool.
SYNTAX = frozenset(
    {
        *("name", "tool_name", "function", "functions", "call", "tool", "tool_call", "invoke"),
        *("type", "id", "index", "tool_call_id", "json", "recipient_name"),
    }
)
USUAL_NAMESPACES = ("functions", "tools", "default_api")
NAMESPACES = frozenset({*SYNTAX, *USUAL_NAMESPACES})
"""Words that models write before a name, with a dot or a colon between."""

_NAMESPACE = re.compile(rf"(?:(?:{'|'.join(sorted(NAMESPACES))})[.:])+")
# Meta's prompts have built-in tools called as `f.call(...)`.
_NUMBER = re.compile(r"(?:[.:]\d+|\.call)\Z")


class Names(Protocol):
    """Tells which tools were offered."""

    def is_offered(self, name: str) -> bool:
        """Tell whether a name is valid for a call."""

    def parameter_types(self, name: str) -> ParameterTypes:
        """Return the argument types of a tool."""


def offered_name(word: str, names: Names) -> str:
    """Return the offered name in a word, which may have a namespace and a number.

    It may also be written as code, or with the sign of a call after it. Any other word before or
    after it makes it the name of another tool.
    """
    plain = word.strip("`").removesuffix(":").removesuffix("()").strip("`")
    name = _NAMESPACE.sub("", plain, count=1) if _NAMESPACE.match(plain) else plain
    candidates = (word, plain, name, _NUMBER.sub("", plain), _NUMBER.sub("", name))
    return next(filter(names.is_offered, candidates), "")
