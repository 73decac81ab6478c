"""Converts nested elements, `<a>1</a><b><item>x</item></b>`, to JSON."""

import re
from collections.abc import Sequence

from backend.output.readers.values.schema import JsonTypes, ParameterTypes
from backend.output.readers.values.typed_value import json_string, json_value

_ITEM = "item"
_TEXT = "$text"
_MAX_DEPTH = 16


def read_elements(
    raw: str, types: JsonTypes, *, mark: str, parts: ParameterTypes, depth: int = _MAX_DEPTH
) -> str:
    """Return the JSON of a raw value, which may contain elements.

    Args:
        raw: The value as written; without complete elements it is a plain value.
        types: Types allowed by the schema.
        mark: The text before each tag.
        parts: Types of the values inside.
        depth: Nesting limit, beyond which elements are text.
    """
    text, elements = _split(raw, mark) if depth else (raw, [])
    if not elements:
        return json_value(raw, types)
    values = [
        (
            name,
            read_elements(
                inner, parts.of(name), mark=mark, parts=parts.inside(name), depth=depth - 1
            ),
        )
        for name, inner in elements
    ]
    is_list = "array" in types or (
        "object" not in types and {name for name, _ in values} == {_ITEM}
    )
    if is_list and not text:
        return f"[{', '.join(value for _, value in values)}]"
    return _object([(_TEXT, json_string(text)), *values] if text else values)


def _object(values: Sequence[tuple[str, str]]) -> str:
    """Return an object; elements of one name form a list."""
    by_name: dict[str, list[str]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    fields = (
        f"{json_string(name)}: {found[0] if len(found) == 1 else '[' + ', '.join(found) + ']'}"
        for name, found in by_name.items()
    )
    return f"{{{', '.join(fields)}}}"


def _split(raw: str, mark: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text outside elements, and the elements; no elements if tags do not match."""
    tag = re.compile(rf"{re.escape(mark)}<(?P<end>/?)(?P<name>[^\s<>/]+)>")
    elements: list[tuple[str, str]] = []
    texts: list[str] = []
    open_names: list[str] = []
    begin = end = 0
    for match in tag.finditer(raw):
        if not match["end"]:
            if not open_names:
                texts.append(raw[end : match.start()])
                begin = match.end()
            open_names.append(match["name"])
        elif open_names and open_names.pop() == match["name"]:
            if not open_names:
                elements.append((match["name"], raw[begin : match.start()]))
                end = match.end()
        else:
            return "", []
    texts.append(raw[end:])
    return ("".join(texts).strip(), elements) if not open_names else ("", [])
