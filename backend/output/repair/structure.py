"""Tells the name of a tool at the beginning of a call from one in a sentence."""

import re

from backend.output.repair.markup import FormatMarkup

# What may end the tag, the string or the brackets around a name.
_ENDS = r"""[>"'|)\],]*+"""
_FENCE = r"""\s*+```(?:json)?\s*+["{]"""
_FENCE_BEGUN = r"\s*+`{1,3}(?:j|js|jso|json)?\s*+"
_CALL = re.compile(
    rf"""{_ENDS}(?:[(\[{{<:=]|/>|\s*+["<{{]|{_FENCE}"""
    r"""|\s++(?:[\[(]\S|>\s*+["<{]|\w++(?:=|</)))"""
)
_BEFORE_CALL = re.compile(rf"{_ENDS}(?:/|\s*+|{_FENCE_BEGUN}|\s++(?:[\[(]|>\s*+|\w++<?))")
_SENTENCE = re.compile(rf"{_ENDS}[ \t]++[^\W\d_]++[\s,.;!?]")
_BEFORE_SENTENCE = re.compile(rf"{_ENDS}(?:[ \t]++[^\W\d_]*+)?")


def goes_on_as_call(markup: FormatMarkup, raw: str, opener: str, *, in_prose: bool) -> bool | None:
    """Tell whether text goes on like a call after its first word; `None` if more text decides.

    Args:
        markup: The format's markup.
        raw: The text from the opener on.
        opener: The opener.
        in_prose: Whether the opener stands within a line of text. Then structure must follow;
            elsewhere it suffices that no sentence does.
    """
    word, _ = markup.first_word(raw)
    begin = raw.find(word, len(opener))
    after = raw[begin + len(word) :]
    if in_prose:
        if "{" in raw[len(opener) : begin] or _CALL.match(after):
            return True
        return None if _BEFORE_CALL.fullmatch(after) else False
    if _SENTENCE.match(after):
        return False
    return None if _BEFORE_SENTENCE.fullmatch(after) else True
