"""Translates JSON schema text to a grammar for llguidance.

Replies are compact JSON: with flexible whitespace, a model may write nothing else until its limit.
"""

import json
from typing import Any

from backend.errors import GrammarError, GrammarSyntaxError
from backend.sampling.grammar.lark import LarkGrammar
from backend.sampling.grammar.schema.limits import require_bounded
from backend.sampling.grammar.schema.tight import with_short_numbers
from backend.sampling.grammar.schema.walk import walk

MAX_NESTING = 120

SETTINGS = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    # Models write "\\u00e9" as well as "é".
    "json_allow_general_unicode_escapes": True,
}


def schema_to_lark(text: str) -> LarkGrammar:
    """Return the grammar of the JSON values allowed by a schema.

    Raises:
        GrammarError: The text is not a schema, or cannot be enforced.
    """
    schema = _parsed(text)
    require_bounded(walk(schema))
    fields = {**with_short_numbers(schema), "x-guidance": SETTINGS}
    return LarkGrammar("%json " + json.dumps(fields))


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarSyntaxError(error.lineno, error.colno, f"not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise GrammarError(
            "this JSON cannot be read: it nests too deep, or has a huge number"
        ) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, or true")
    if _nesting(schema) > MAX_NESTING:
        raise GrammarError(f"the JSON schema nests more than {MAX_NESTING} deep")
    return schema


def _nesting(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        lists = [
            v if isinstance(v, list) else list(v.values())
            for v in level
            if isinstance(v, list | dict)
        ]
        level = [inner for values in lists for inner in values]
    return depth
