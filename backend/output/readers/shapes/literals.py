"""The shapes of calls that look like a programming language."""

import re

from backend.formats.dialects import Literals, Reading
from backend.formats.template import ARGUMENTS, KEY, NAME, split_at, text_of
from backend.output.readers.calls.literal_call import LiteralDialect
from backend.output.readers.patterns import SPACE, Pattern, any_of, choice, fixed, maybe
from backend.output.readers.values.literal import LiteralSyntax

_BRACKETS = {"{": "}", "[": "]"}
_WORD = re.compile(r"[\w.+-]*")


def literal_dialect(reading: Reading, dialect: Literals) -> LiteralDialect:
    """Return the brackets and quotes of a dialect in the reader's form."""
    call, call_end = split_at(dialect.call, ARGUMENTS)
    begin, bracket = (text_of(part) for part in split_at(call, NAME))
    assign = text_of(split_at(dialect.argument, KEY)[1]).strip()
    return LiteralDialect(
        call=_call_pattern(begin, bracket),
        call_begin=begin,
        call_end=text_of(call_end),
        key=_key_pattern(dialect, assign),
        syntax=_syntax(dialect, bracket),
        block_end=reading.end,
        other_block_ends=reading.other_ends,
        has_positions=dialect.has_positions,
    )


def _call_pattern(begin: str, bracket: str) -> Pattern:
    if begin:
        name = any_of(r"[^\s:,<>(){}]", group="name")
        return Pattern((fixed(begin), SPACE, name, SPACE, fixed(bracket)))
    return Pattern((any_of(r"[\w./-]", group="name"), fixed(bracket)))


def _key_pattern(dialect: Literals, assign: str) -> Pattern:
    if dialect.has_bare_text:
        quote = maybe(choice(*map(fixed, dialect.quotes)))
        name = any_of(r'[^\s:,<>"{}\[\]]', group="name")
        return Pattern((SPACE, quote, name, quote, SPACE, fixed(assign)))
    return Pattern((any_of(r"\w", group="name"), SPACE, fixed(assign)))


def _syntax(dialect: Literals, bracket: str) -> LiteralSyntax:
    firsts = "".join(sorted({re.escape(quote[0]) for quote in dialect.quotes}))
    has_bare_text = dialect.has_bare_text
    return LiteralSyntax(
        quotes=dialect.quotes,
        plain=re.compile(rf"[^{firsts}\\]*"),
        bare=re.compile(r"[^,{}\[\]]*") if has_bare_text else _WORD,
        bare_key=re.compile(rf"[^:,{firsts}{{}}\[\]]*") if has_bare_text else _WORD,
        brackets=_BRACKETS | ({"(": ")"} if bracket == "(" else {}),
        has_escapes=dialect.has_escapes,
        format_plain=re.compile(rf"[^{firsts}\\{{}}]*"),
    )
