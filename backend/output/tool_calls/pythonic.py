"""Calls in Python, `[f(a="x", n=2), g()]`: LFM2, Llama 4, OLMo 3, and prompts that ask for it."""

import re
from dataclasses import replace
from functools import partial

from backend.output.tool_calls.choice import ChoiceCursor
from backend.output.tool_calls.json_block import JsonBlockCursor
from backend.output.tool_calls.literal import LiteralSyntax
from backend.output.tool_calls.literal_call import LiteralCallCursor, LiteralDialect
from backend.output.tool_calls.markup import Tag
from backend.output.tool_calls.wire import WireContext, WireCursor

LIST = "["
OPENERS = ("<|tool_call_start|>", "<|python_start|>")
CLOSERS = ("<|tool_call_end|>", "<|python_end|>")
OLMO_OPENER, OLMO_CLOSER = "<function_calls>", "</function_calls>"

_CLOSERS = dict(zip((*OPENERS, OLMO_OPENER), (*CLOSERS, OLMO_CLOSER), strict=True))

_WORD = re.compile(r"[\w.+-]*")

BARE_LIST = LiteralDialect(
    call=Tag(
        "",
        re.compile(r"(?P<name>[\w./-]+)"),
        ends=("(",),
        unfinished=re.compile(r"[\w./-]*"),
    ),
    call_end=")",
    key=Tag(
        "", re.compile(r"(?P<name>\w+)\s*"), ends=("=",), unfinished=re.compile(r"(?:\w+\s*)?")
    ),
    syntax=LiteralSyntax(
        quotes=('"""', "'''", '"', "'"),
        plain=re.compile(r"[^\"'\\]*"),
        bare=_WORD,
        bare_key=_WORD,
        brackets={"{": "}", "[": "]", "(": ")"},
        has_escapes=True,
    ),
    has_positions=True,
)


def make_pythonic(context: WireContext) -> WireCursor:
    """Read calls; between markers, where JSON was asked for, read that."""
    if context.opener == LIST:
        return LiteralCallCursor(context, dialect=BARE_LIST)
    closer = _CLOSERS[context.opener]
    read_json = partial(JsonBlockCursor, closer=closer)
    read_calls = partial(LiteralCallCursor, dialect=replace(BARE_LIST, block_end=closer))
    return ChoiceCursor(context, choices={"{": read_json, "[{": read_json}, otherwise=read_calls)
