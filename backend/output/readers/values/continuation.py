"""Continues a JSON text that was emitted in part."""

import json
from itertools import product

from backend.output.readers.values.json_scanner import SURROGATE
from backend.output.readers.values.typed_value import ESCAPED_REPLACEMENT


def continued(sent: str, value: str) -> str | None:
    """Return the rest of a JSON text after its beginning was sent, or `None` if it differs.

    Args:
        sent: The text sent.
        value: The whole value, which may be written in another style.
    """
    if value.startswith(sent):
        return value[len(sent) :]
    parsed = json.loads(value)
    styles = product((False, True), ((", ", ": "), (",", ":"), (",", ": ")))
    written = (json.dumps(parsed, ensure_ascii=a, separators=s) for a, s in styles)
    texts = (SURROGATE.sub(ESCAPED_REPLACEMENT, text) for text in written)
    return next((text[len(sent) :] for text in texts if text.startswith(sent)), None)
