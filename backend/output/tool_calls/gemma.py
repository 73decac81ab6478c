"""Calls as `call:f{a:<|"|>x<|"|>,n:2}` between markers: Gemma 4, and FunctionGemma alike."""

import re
from functools import partial

from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.literal import LiteralSyntax
from backend.output.tool_calls.literal_call import LiteralCallCursor, LiteralDialect
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.wire import WireContext, WireCursor

CALL = "call:"
GEMMA4_OPENER, GEMMA4_CLOSER, GEMMA4_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_OPENER, FUNCTION_CLOSER = "<start_function_call>", "<end_function_call>"
FUNCTION_QUOTE = "<escape>"


def _dialect(quote: str, closer: str) -> LiteralDialect:
    optional_quote = f'(?:{re.escape(quote)}|")?'
    name = rf'\s*{optional_quote}(?P<name>[^\s:,<>"{{}}\[\]]+){optional_quote}\s*'
    return LiteralDialect(
        call=Tag(
            CALL,
            re.compile(r"\s*(?P<name>[^\s:,<>(){}]+)\s*"),
            ends=("{",),
            unfinished=re.compile(r"[^:,<>(){}]*"),
        ),
        call_end="}",
        key=Tag("", re.compile(name), ends=(":",), unfinished=re.compile(r"[^:,{}\[\]]*")),
        syntax=LiteralSyntax(
            # Small models fall back on the quotes of JSON.
            quotes=(quote, '"'),
            plain=re.compile('[^<"]*'),
            bare=re.compile(r"[^,{}\[\]]*"),
            bare_key=re.compile(r'[^:,<"{}\[\]]*'),
            brackets={"{": "}", "[": "]"},
            has_escapes=False,
        ),
        block_end=closer,
    )


GEMMA4 = _dialect(GEMMA4_QUOTE, GEMMA4_CLOSER)
FUNCTION_GEMMA = _dialect(FUNCTION_QUOTE, FUNCTION_CLOSER)


def make_gemma4(context: WireContext) -> WireCursor:
    """Read calls; fine-tunes write JSON between the markers now and then."""
    return _choice(context, GEMMA4)


def make_functiongemma(context: WireContext) -> WireCursor:
    """Read calls, or JSON between the markers."""
    return _choice(context, FUNCTION_GEMMA)


def _choice(context: WireContext, dialect: LiteralDialect) -> WireCursor:
    read_json = partial(JsonBlockCursor, closer=dialect.block_end)
    read_calls = partial(LiteralCallCursor, dialect=dialect)
    return ChoiceCursor(context, choices={'{"': read_json, "[": read_json}, otherwise=read_calls)
