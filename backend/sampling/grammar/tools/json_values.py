"""Arguments and their values as JSON, spaced as in templates."""

import json
import re

from backend.sampling.grammar.schema.tight import Schema, tightened
from backend.sampling.grammar.schema.translation import SETTINGS
from backend.sampling.grammar.tools.parameters import Parameters
from backend.sampling.grammar.writer import GrammarWriter

_DEFINITIONS = ("$defs", "definitions")
# As templates write calls.
_SETTINGS = SETTINGS | {"item_separator": ", ", "key_separator": ": "}


def json_arguments(parameters: Parameters, writer: GrammarWriter) -> str:
    """Return the expression of the arguments as a JSON object."""
    return writer.rule(json_value(parameters.schema))


def json_value(schema: Schema, forbidden: tuple[str, ...] = ()) -> str:
    """Return the expression of a JSON value that contains none of the forbidden tags."""
    return "%json " + json.dumps({**tightened(schema, forbidden), "x-guidance": _SETTINGS})


def json_part(schema: Schema, parameters: Parameters, forbidden: tuple[str, ...] = ()) -> str:
    """Return the same for a value whose schema is part of a tool's.

    Raises:
        GrammarError: It refers to another part that is not a definition.
    """
    definitions = {key: parameters.schema[key] for key in _DEFINITIONS if key in parameters.schema}
    if not _references(schema):
        return json_value(schema, forbidden)
    for reference in _references([schema, definitions]):
        if not reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
            raise parameters.error(reference, "is referenced but is not a definition")
    return json_value({**schema, **definitions}, forbidden)


def json_text(value: object) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def _references(schema: object) -> list[str]:
    return re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
