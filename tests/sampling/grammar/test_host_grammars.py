"""Grammars as the host writes them: texts that they must accept, and texts that they must not.

A grammar that accepts too little passes every check of its outputs, so the first matter more.
"""

import json
from pathlib import Path

import pytest
from grammar_driver import accepts, compile_text

from backend.errors import GrammarSyntaxError

GRAMMARS = Path(__file__).parents[2] / "golden" / "gbnf"
MALFORMED = {"schema_enum_quote"}  # the host does not escape a quote in an enum

EVENT = '{"date":"today","time":"9:00","title":"a \\"b\\" \\u00e9 \\n"}'
CALLS = [
    f'{{"arguments":{EVENT},"name":"create_event"}}',
    '{ "arguments" : { "query" : "é 中 😀 /" } , "name" : "search"} ',
]
BROKEN_CALLS = [
    "",
    "{}",
    CALLS[0][:-1],
    CALLS[0].replace("create_event", "search"),
    CALLS[0].replace("today", "to\nday"),
    CALLS[0].replace("today", "to\x7fday"),
    CALLS[0].replace("today", "to\\day"),
    CALLS[0].replace('"time":"9:00",', ""),
    CALLS[1].replace('{ "arg', '{  "arg'),
    CALLS[1].replace("}", "},", 1),
]
PARALLEL = ["[\n]", f"[\n{CALLS[0]}]", f"[\n{CALLS[0]},\n{CALLS[1]}]"]
BROKEN_PARALLEL = [
    f"[{CALLS[0]}]",
    f"[\n{CALLS[0]},{CALLS[1]}]",
    f"[\n{CALLS[0]}",
    f"[\n,{CALLS[0]}]",
]
OBJECTS = [
    "{}",
    "{ }\n",
    '{"a":1}',
    '{"a" : [1, -2.5e+3, 0.5, true, false, null, {"b": {}}, []], "c": ""}',
    '{"a":"\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9 é 中 😀"}',
    json.dumps({"a": {"b": [{"c": [[["d"]]]}] * 3}}, indent=1),
]
BROKEN_OBJECTS = [
    *("", "[]", "1", "{", "}", '{"a"}', '{"a":}', '{"a":1,}', '{"a":1 "b":2}', "{'a':1}", "{a:1}"),
    *('{"a":01}', '{"a":1.}', '{"a":.5}', '{"a":tru}', '{"a":[1,]}', '{"a":"\n"}', '{"a":"\\x"}'),
    *('{"a":"\t"}', '{"a":"\x00"}', '{"a":"\\u12"}', '{"a":1}}', "{}{}", '{"a":+1}', '{"a":"'),
]
COMPANY = '{"city":null,"companyname":"A","street":"B"}'
PARAMETERS = (
    '{"param_0":"a","param_1":10,"param_2":true,"param_3":["x","y"],'
    '"param_4":"","param_5":-3,"param_6":false,"param_7":[]}'
)
ANYTHING = ["", "Hello, world.\n", "é 中 😀", *CALLS]

ACCEPTED_AND_REFUSED = {
    "json_object": (OBJECTS, BROKEN_OBJECTS),
    "json_schema_company": (
        [
            '{"companylist":[],"filter":""}',
            f'{{"companylist":[{COMPANY}],"filter":"x"}}',
            f'{{ "companylist": [{COMPANY} , {COMPANY}],"filter":"x"}}',
        ],
        ['{"companylist":[]}', '{"filter":"","companylist":[]}', '{"companylist":[1],"filter":""}'],
    ),
    "llamacpp_arith": (
        ["a=b\n", "a=b \n", "x1 +1 = 2\n", "(a*(b-1))/c=d\ne_f=\n(g) \n\n", "a=\n\t1\n\nb=2\n"],
        ["a=b", "a=\n", "=b\n", "a+=b\n", "(a=b\n", "A=b\n", "a=b+c\n"],
    ),
    "llamacpp_chess": (
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. d4 d5\n2. c4 dxc4\n3. O-O O-O-O\n10. e8=Q+ Kxe8#\n"],
        ["1. e4 e5\n", "1. e9 e5\n2. a4 a5\n", "2. e4 e5\n2. a4 a5\n", "1. e4 e5\n2. Nf3 Nc6"],
    ),
    "llamacpp_json": ([*OBJECTS[:4], OBJECTS[4].replace("\\/", "/")], BROKEN_OBJECTS),
    "llamacpp_list": (
        ["- one\n", "- one\n- two, 2\n- drei é\n"],
        ["", "- \n", "-one\n", "- one", "- a\rb\n", "- a\u2028b\n", "- a\x85b\n", "- a\n\n"],
    ),
    "schema_camel_snake": (
        ['{"UserID":"a","userId":"x","user_id":0}', '{"UserID":"b","userId":"","user_id":-12 } '],
        ['{"UserID":"c","userId":"x","user_id":0}', '{"UserID":"a","userId":"x","user_id":-01}'],
    ),
    "schema_case_props_obj": (
        ['{"fooBar":"x","foo_bar":"y"}'],
        ['{"fooBar":"y","foo_bar":"x"}', '{"foo_bar":"y","fooBar":"x"}'],
    ),
    "schema_deep32": (
        ["[]", "[ [] , []]", "[" * 32 + '"a", "b"' + "]" * 32, "[" * 31 + "[],[" + "]" * 32],
        ["", "[", '["a"]', "[" * 33 + "]" * 33, "[" * 32 + "1" + "]" * 32, "[" * 32 + "]" * 31],
    ),
    "schema_empty_obj": (["{}", "{ } "], ["", "{  }", '{"a":1}', "{}}"]),
    "schema_enum_backslash": (['{"x":"a\\b"}', '{"x":"c"}'], ['{"x":"a\\\\b"}', '{"x":"ab"}']),
    "schema_ref_siblings": (['{"x":"","y":"z"}'], ['{"x":""}', '{"x":"","y":1}']),
    "schema_root_string": (['""', '"a b\\n"', '"\\u00e9" '], ['"', '"a\nb"', "a", '"\\u00g0"']),
    "test_yesno": (["yes", "no"], ["", "y", "yesno", "Yes", "maybe"]),
    "tools_big30x8": (
        [
            f'{{"name":"tool_0","arguments":{PARAMETERS}}}',
            f'{{ "name": "tool_29","arguments" :{PARAMETERS}}} ',
        ],
        [
            f'{{"name":"tool_30","arguments":{PARAMETERS}}}',
            f'{{"name":"tool_0","arguments":{PARAMETERS.replace("-3", "3.5")}}}',
            f'{{"name":"tool_0","arguments":{PARAMETERS.replace("true", "null")}}}',
        ],
    ),
    "tools_default": (CALLS, [*BROKEN_CALLS, *PARALLEL]),
    "tools_freestring_nomixed": ([*ANYTHING, *PARALLEL], ["\x00", "a\x00b"]),
    "tools_llama31": (
        [
            f"<function=create_event>{{{EVENT}}}</function>",
            '<function=search>{{"query":"x"}}</function>',
        ],
        [
            '<function=search>{"query":"x"}</function>',
            '<function=other>{{"query":"x"}}</function>',
            '<function=search>{{"query":"x\n"}}</function>',
            *CALLS,
        ],
    ),
    "tools_mixed": (ANYTHING, ["\x00"]),
    "tools_mixed_parallel": ([*ANYTHING, *PARALLEL], ["\x00"]),
    "tools_noaction": (
        [*CALLS, '{"arguments":{"message":"Hello"},"name":"answer"}'],
        [*BROKEN_CALLS, '{"arguments":{"query":"Hello"},"name":"answer"}'],
    ),
    "tools_parallel": ([*CALLS, *PARALLEL], [*BROKEN_CALLS, *BROKEN_PARALLEL]),
    "tools_parallel_nonl": (
        [*CALLS, "[]", f"[{CALLS[0]},{CALLS[1]}]"],
        [*BROKEN_CALLS, *PARALLEL, f"[{CALLS[0]},]"],
    ),
    "tools_prefix": (
        [f"<tool_call>\n{call}" for call in CALLS],
        [*CALLS, "<tool_call>", *[f"<tool_call>\n{call}" for call in BROKEN_CALLS]],
    ),
    "tools_prefix_mixed_par": (
        [*ANYTHING, *PARALLEL, f"<tool_call>\n{CALLS[0]}", f"<tool_call>\n{PARALLEL[2]}"],
        ["\x00"],
    ),
    "tools_proporder": (
        [f'{{"name":"create_event","arguments":{EVENT}}}'],
        [*CALLS, f'{{"name":"search","arguments":{EVENT}}}'],
    ),
    "tools_rich_enum_lt_gt": (
        [
            '{"name":"calc","arguments":{"op":"<=","x":1.5e-3,"y":-0}}',
            '{"name":"calc","arguments":{"op":"&&","x":0,"y":10}}',
            '{"name":"calc","arguments":{"op":"é","x":0,"y":10}}',
            '{"name":"get_weather","arguments":{"city":"Rome","days":3,"unit":"celsius"}}',
            '{"name":"set_flags","arguments":{"on":true,"opt":null,"tags":["a", "b"]}}',
            '{"name":"set_flags","arguments":{"on":false,"opt":"x","tags":[]}}',
            '{"name":"ping","arguments":{}}',
        ],
        [
            '{"name":"calc","arguments":{"op":"=","x":0,"y":10}}',
            '{"name":"calc","arguments":{"op":"\\u003c","x":0,"y":10}}',
            '{"name":"get_weather","arguments":{"city":"Rome","days":3.0,"unit":"celsius"}}',
            '{"name":"ping","arguments":{"a":1}}',
        ],
    ),
    "tools_strings_after": ([*ANYTHING, *PARALLEL, f"a {CALLS[0]} b {CALLS[1]}"], ["\x00"]),
}


def test_every_grammar_has_cases():
    assert {path.stem for path in GRAMMARS.iterdir()} == MALFORMED | ACCEPTED_AND_REFUSED.keys()


@pytest.mark.parametrize("name", ACCEPTED_AND_REFUSED)
def test_a_host_grammar_accepts_what_it_means(name, compiler):
    compiled = compile_text(compiler, (GRAMMARS / f"{name}.gbnf").read_text(encoding="utf-8"))
    accepted, refused = ACCEPTED_AND_REFUSED[name]
    assert [text for text in accepted if not accepts(compiled, text)] == []
    assert [text for text in refused if accepts(compiled, text)] == []


def test_a_host_grammar_with_an_unescaped_quote_is_refused_with_its_place(compiler):
    text = (GRAMMARS / "schema_enum_quote.gbnf").read_text(encoding="utf-8")
    with pytest.raises(GrammarSyntaxError) as refusal:
        compile_text(compiler, text)
    assert (refusal.value.line, refusal.value.column) == (6, 24)
