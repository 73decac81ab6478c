"""Texts that would crash llguidance, or keep it busy for long: each meets a bound before it.

The shapes were found by running the library; a bound that is lifted shows here as a crash.
"""

import json

import pytest
from grammar_driver import compile_text, walk

from backend.errors import GrammarError
from backend.sampling.grammar.gbnf_rules import MAX_CHAIN

# The promise is a second; a machine that is busy with other things takes longer.
pytestmark = pytest.mark.timeout(20)


def rules(count, body, last):
    chain = "\n".join(f"r{n} ::= {body.format(n + 1)}" for n in range(count))
    return f"root ::= r0\n{chain}\nr{count} ::= {last}"


def spread(lines):
    return "root ::= " + " | ".join(f"r{n}" for n in range(lines)) + "\n"


def strings(**fields):
    return json.dumps({"type": "string", **fields})


def definitions(count, make, last):
    named = {f"d{n}": make(n, {"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**named, f"d{count}": last}})


BOMBS = {
    "too long": ('root ::= "' + "a" * 300_000 + '"', "larger than 256 KiB"),
    "too long in bytes": ('root ::= "' + "é" * 140_000 + '"', "larger than 256 KiB"),
    "one long literal": ('root ::= "' + "a" * 200_000 + '"', "in a row"),
    "deep references": (rules(9000, 'r{0} "x"', '"a"'), "500 deep"),
    "references over the limit": (rules(MAX_CHAIN, 'r{0} "x"', '"a"'), "500 deep"),
    "recursion in a deep circle": (rules(600, '"(" r{0} ")"', '"a" | "[" root "]"'), "500 deep"),
    "thousands that double": (rules(2000, "r{0} r{0}", '"a"'), "500 deep"),
    "hundreds that double": (rules(400, "r{0} r{0}", '"a"'), "in a row"),
    "hundreds of classes that double": (rules(400, "r{0} r{0}", "[a-z]"), "in a row"),
    "twenty of options that double": (rules(20, "r{0} r{0}", "[a-z]?"), "in a row"),
    "a long row of options": (
        "root ::= " + " ".join(f"[a-{chr(98 + n % 20)}]?" for n in range(5000)),
        "optional items",
    ),
    "an endless list of options": ('root ::= ("a"?)*', "may be empty"),
    "left recursion": ('root ::= root "a" | "a"', "left-recursive"),
    "thousands of groups": ("root ::= " + '("a" | "b") ' * 20_000, "rules and groups"),
    "groups in groups": ("root ::= " + "(" * 50_000, "groups nest"),
    "groups in rules in groups": (
        rules(400, "((((((r{0} | [a]) | [b]) | [c]) | [d]) | [e]) | [f])", '"x"'),
        "nest more than 2000 deep",
    ),
    "huge counts": ('root ::= "a"{1000000}', "a count is over"),
    "JSON in JSON": ('{"items":' * 5000, "nest|not JSON"),
    "JSON too deep for the library": ('{"items":' * 130 + "{}" + "}" * 130, "nests more than 120"),
    "deep schema references": (definitions(5000, lambda _, ref: ref, {}), "500 deep"),
    "many optional properties": (
        json.dumps({"properties": {f"p{n}": {} for n in range(5000)}}),
        "optional properties",
    ),
    "many patterns for names": (
        json.dumps({"patternProperties": {f"^{n:04d}": {} for n in range(500)}}),
        "pattern properties",
    ),
    "many patterns at once": (
        strings(allOf=[{"pattern": f"a{n}"} for n in range(30)]),
        "patterns are combined",
    ),
    "many patterns at once, through references": (
        definitions(30, lambda n, ref: {"pattern": f"a{n}", **ref}, {"type": "string"}),
        "patterns are combined",
    ),
    "a large multiple": ('{"type":"integer","multipleOf":9999991}', "'multipleOf' are too large"),
    "multiples that multiply": (
        '{"type":"integer","allOf":[{"multipleOf":997},{"multipleOf":991}]}',
        "combined values of 'multipleOf'",
    ),
    "a wide union of wide objects": (
        json.dumps(
            {"anyOf": [{"properties": {f"k{m}{n}": {} for n in range(30)}} for m in range(500)]}
        ),
        "more than 10000 schemas",
    ),
    "a product of unions": (
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{m}{n}": {}}} for n in "ab"]} for m in range(20)
                ]
            }
        ),
        "too large",
    ),
    "a circle of references": (
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}',
        "no text can complete it",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name, compiler):
    text, problem = BOMBS[name]
    with pytest.raises(GrammarError, match=problem):
        compile_text(compiler, text)


HARMLESS = {
    "two thousand schemas deep": (
        definitions(450, lambda _, ref: {"items": {"items": {"items": {"items": ref}}}}, {}),
        "[[[[[[[[",
    ),
    "four hundred rules deep": (rules(400, '"x" r{0}', '"a"'), "xxx"),
    "four hundred recursive rules deep": (rules(400, '"(" r{0} ")"', '"a" | "[" root "]"'), "(((("),
    "counts of counts": ("root ::= " + "(" * 9 + "[a-z]" + "){1,1000}" * 9, "abc"),
    "counts of counts of recursion": (
        'root ::= ((("c" | "(" root ")"){1,2000}){1,2000}){1,2000}',
        "cc(c(c)c",
    ),
    "a hundred thousand": ("root ::= [a-z]{1,100000}", "abc"),
    "states by the power of two": ('root ::= [ab]* "a" ' + "[ab] " * 200, "abababab"),
    "ten thousand words": ("root ::= " + " | ".join(f'"{n}"' for n in range(10_000)), "999"),
    "many readings": ('root ::= "a" root root | "a"', "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    "a pattern of patterns": (strings(pattern="^((a{1,1000}){1,1000}){1,1000}$"), '"aaa'),
    "states of a pattern": (strings(pattern="^(a|b)*a(a|b){200}$"), '"abab'),
    "a long pattern": (strings(pattern="a" * 100_000), '"aaa'),
    "many items": ('{"type":"array","items":{"type":"object"},"minItems":1000000}', "[{},{}"),
    "many words": (json.dumps({"enum": [f"word {n}" for n in range(10_000)]}), '"word 9'),
    "a thousand optional properties": (
        json.dumps(
            {"additionalProperties": False, "properties": {f"p{n}": {} for n in range(999)}}
        ),
        '{"p5":1,"p900":2',
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_a_bomb_is_compiled(name, compiler):
    text, beginning = HARMLESS[name]
    matcher = compile_text(compiler, text).matcher()
    assert walk(matcher, beginning) == len(beginning), matcher.error
