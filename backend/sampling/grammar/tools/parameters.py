"""The parameters of tools, as far as a grammar can enforce them."""

import json
from dataclasses import dataclass
from typing import Any

from backend.core.prompt import Tool
from backend.errors import GrammarError
from backend.sampling.grammar.schema.tight import Schema, type_names
from backend.sampling.grammar.schema.translation import schema_to_lark

_OPENING = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of one tool.

    Attributes:
        schema: Schema of an object, which is closed unless it says otherwise.
    """

    tool: str
    schema: Schema

    @classmethod
    def of(cls, tool: Tool) -> "Parameters":
        """Return the parameters of a tool.

        Raises:
            GrammarError: The schema cannot be enforced; the message says where.
        """
        text = json.dumps(tool.parameters)
        try:
            schema_to_lark(text)
        except GrammarError as error:
            raise GrammarError(f"tool {tool.name!r}: {error.problem}") from error
        schema: dict[str, Any] = json.loads(text)
        parameters = cls(tool.name, schema)
        if "object" not in (type_names(schema) or {"object"}):
            raise parameters.error("#/type", "arguments are an object")
        schema["type"] = "object"
        if not any(keyword in schema for keyword in _OPENING):
            schema["additionalProperties"] = False
        return parameters

    def error(self, pointer: str, problem: str) -> GrammarError:
        """Return an error saying that a part of the schema cannot be enforced."""
        return GrammarError(f"tool {self.tool!r}: {pointer}: {problem}")
