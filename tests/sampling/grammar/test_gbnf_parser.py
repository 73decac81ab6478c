import pytest

from backend.errors import GrammarSyntaxError
from backend.sampling.grammar.gbnf_parser import (
    MAX_COUNT,
    MAX_NESTED_GROUPS,
    Cursor,
    Item,
    Literal,
    Reference,
    TokenReference,
    parse_gbnf,
)
from backend.sampling.grammar.vocabulary import ANY_CHARACTER, CharSet


def parsed(text):
    return parse_gbnf(Cursor(text))


def only_item(body):
    ((item,),) = parsed(f"root ::= {body}")["root"].alternatives
    return item


def characters(text):
    return CharSet.of((ord(character), ord(character)) for character in text)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"abc"', "abc"),
        ('""', ""),
        (r'"\n\r\t\\\"\[\]\-"', '\n\r\t\\"[]-'),
        (r'"\x41\u00e9\U0001F600"', "Aé😀"),
        (r'"\x41bc"', "Abc"),  # two digits, no more
        ('"é中😀"', "é中😀"),
        ('"# no comment"', "# no comment"),
        ('"over\ntwo lines"', "over\ntwo lines"),
        ('"it\'s [a] (b) | c"', "it's [a] (b) | c"),
    ],
)
def test_a_literal_means_its_characters(written, meant):
    assert only_item(written).atom == Literal(meant)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("[abc]", characters("abc")),
        ("[a-c]", characters("abc")),
        ("[a-cx-z0]", characters("abcxyz0")),
        ("[a-]", characters("a-")),
        ("[-a]", characters("-a")),
        ("[+--]", characters("+,-")),
        (r"[\]\[\\\"\-]", characters('][\\"-')),
        (r"[\x41-\x43]", characters("ABC")),
        (r"[\u4e00-\u4e02]", CharSet.of([(0x4E00, 0x4E02)])),
        (r"[\U0001F600-\U0001F602]", CharSet.of([(0x1F600, 0x1F602)])),
        ("[&&]", characters("&")),
        ("[!--]", characters("!\"#$%&'()*+,-")),
        ("[a~~b]", characters("a~b")),
        ("[a^]", characters("a^")),
        ("[[]", characters("[")),
        ("[#(.|)*]", characters("#(.|)*")),
        ("[^a]", ~characters("a")),
        ("[^^]", ~characters("^")),
        (r"[^\x00]", ~characters("\0")),
        ("[\r\n]", characters("\r\n")),
        (".", ANY_CHARACTER),
        (r"[\uD000-\uFFFF]", CharSet.of([(0xD000, 0xD7FF), (0xE000, 0xFFFF)])),
    ],
)
def test_a_class_means_its_characters(written, meant):
    assert only_item(written).atom == meant


@pytest.mark.parametrize("written", [r'[^"\\]', r'[^\\"]', r'[^"\\/]', r'[^"\\\x7F\x00-\x1F]'])
def test_the_inside_of_a_json_string_has_no_control_characters(written):
    inside = only_item(written).atom
    assert not any(chr(code) in inside for code in [*range(0x20), 0x7F])
    assert "a" in inside
    assert "é" in inside


@pytest.mark.parametrize("written", ['[^"]', r"[^\\]", "[^a]", r'["\\\n]'])
def test_other_classes_keep_control_characters(written):
    assert "\n" in only_item(written).atom


@pytest.mark.parametrize(
    ("written", "least", "most"),
    [
        ('"a"*', 0, None),
        ('"a"+', 1, None),
        ('"a"?', 0, 1),
        ('"a" *', 0, None),
        ('"a"{3}', 3, 3),
        ('"a"{0}', 0, 0),
        ('"a"{2,}', 2, None),
        ('"a"{2,4}', 2, 4),
        ('"a" { 2 , 4 }', 2, 4),
        ('"a"{0000000000000000000000000000002}', 2, 2),
    ],
)
def test_an_operator_repeats_what_stands_before_it(written, least, most):
    assert only_item(written) == Item(Literal("a"), least, most)


def test_a_second_operator_repeats_the_first_repetition():
    rules = parsed('root ::= "a"{2}{0,3}')
    ((item,),) = rules["root"].alternatives
    assert (item.least, item.most) == (0, 3)
    assert rules[item.atom.rule].alternatives == ((Item(Literal("a"), 2, 2),),)


def test_alternatives_and_sequences_may_be_empty():
    rules = parsed('root ::= | "a" b || "c"\nb ::=')
    words = ((Item(Literal("a")), Item(Reference("b"))), (Item(Literal("c")),))
    assert rules["root"].alternatives == ((), words[0], (), words[1])
    assert rules["b"].alternatives == ((),)


def test_a_group_is_a_rule_of_its_own():
    rules = parsed('root ::= "a" ("b" | "c")?')
    (_, group), *_ = rules["root"].alternatives
    assert (group.least, group.most) == (0, 1)
    assert rules[group.atom.rule].is_group
    assert rules[group.atom.rule].alternatives == ((Item(Literal("b")),), (Item(Literal("c")),))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" b\nb ::= "c"',
        'root ::= "a" b\r\nb ::= "c"\r\n',
        'root ::= "a" b\rb ::= "c"',
        '# first\n\n\troot ::= "a" b # why\n# b\n  b::="c"#end',
        'root ::=\n  "a" b\n\n\nb ::= # c\n\n "c"',
        'b ::= "c"\nroot ::= "a" b',
        'b ::= "x"\nroot ::= "a" b\nb ::= "c"',  # the last of two is meant
    ],
)
def test_space_comments_and_line_breaks_mean_nothing(text):
    rules = parsed(text)
    assert rules["root"].alternatives == ((Item(Literal("a")), Item(Reference("b"))),)
    assert rules["b"].alternatives == ((Item(Literal("c")),),)


def test_a_line_may_break_after_a_bar_and_inside_a_group():
    rules = parsed('root ::= "a" |\n "b" (\n "c"\n *\n | "d"\n)\nend ::= "e"')
    assert len(rules["root"].alternatives) == 2
    assert rules["end"].alternatives == ((Item(Literal("e")),),)


@pytest.mark.parametrize("name", ["start", "1st", "a-b", "a_b", "ROOT", "Root", "-", "_", "if"])
def test_any_name_will_do(name):
    assert parsed(f"{name} ::= {name}2\n{name}2 ::= [0-9]").keys() == {name, f"{name}2"}


@pytest.mark.parametrize(
    ("written", "token", "is_negated"),
    [("<[12]>", 12, False), ("!<[12]>", 12, True), ("<think>", "<think>", False)],
)
def test_a_token_is_named_by_its_id_or_its_text(written, token, is_negated):
    assert only_item(written).atom == TokenReference(token, is_negated)


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("root", 1, 5, "expected '::='"),
        ("root := a", 1, 6, "expected '::='"),
        ("::= a", 1, 1, "name of a rule"),
        ('root ::= "a"\n| "b"', 2, 1, "name of a rule"),
        ('root ::= "a" ::= "b"', 1, 14, "unexpected ':'"),
        ('root ::= "a" ) "b"', 1, 14, "unexpected ')'"),
        ('root ::= "a" } "b"', 1, 14, "unexpected '}'"),
        ('root ::= "a" ] "b"', 1, 14, "unexpected ']'"),
        ("root ::= 'a'", 1, 10, 'unexpected "\'"'),
        ('root ::= "a" é', 1, 14, "unexpected 'é'"),
        ('root ::= "a"\0', 1, 13, "unexpected '\\x00'"),
        ('x ::= "a"\n\nroot ::= "b', 3, 10, "literal has no end"),
        ('x ::= "a"\r\n\r\nroot ::= "b', 3, 10, "literal has no end"),
        ("root ::= [ab", 1, 10, "class has no end"),
        ("root ::= [a-", 1, 10, "class has no end"),
        ("root ::= []", 1, 10, "class is empty"),
        ("root ::= [^]", 1, 10, "class is empty"),
        ("root ::= [abz-a]", 1, 13, "ends before it starts"),
        (r'root ::= "a\qb"', 1, 12, "unknown escape"),
        (r'root ::= "\/"', 1, 11, "unknown escape"),
        ('root ::= "a\\', 1, 12, "unknown escape"),
        (r"root ::= [\w]", 1, 11, "unknown escape"),
        (r'root ::= "\x4"', 1, 11, "\\x takes 2"),
        (r'root ::= "\u12g4"', 1, 11, "\\u takes 4"),
        (r'root ::= "\U0001F60"', 1, 11, "\\U takes 8"),
        (r'root ::= "\U00110000"', 1, 11, "no such character"),
        (r'root ::= "ab\ud83d\ude00"', 1, 13, "surrogate"),
        ('root ::= ("a"\n "b"', 1, 10, "group has no end"),
        ('root ::= ("a" ]', 1, 15, "expected ')'"),
        ("root ::= *", 1, 10, "nothing to repeat"),
        ('root ::= "a" | +', 1, 16, "nothing to repeat"),
        ('root ::= (? "a")', 1, 11, "nothing to repeat"),
        ('root ::= "a"{', 1, 14, "expected a number"),
        ('root ::= "a"{,3}', 1, 14, "expected a number"),
        ('root ::= "a"{-1}', 1, 14, "expected a number"),
        ('root ::= "a"{2', 1, 15, "expected '}'"),
        ('root ::= "a"{2;3}', 1, 15, "expected '}'"),
        ('root ::= "a"{3,2}', 1, 13, "below the least"),
        (f'root ::= "a"{{{MAX_COUNT + 1}}}', 1, 13, "a count is over"),
        (f'root ::= "a"{{1,{"9" * 5000}}}', 1, 13, "a count is over"),
        ("root ::= <think", 1, 10, "token has no end"),
        ("root ::= <[x]>", 1, 12, "expected a number"),
        ("root ::= <[1>", 1, 13, "expected ']>'"),
        ("root ::= !a", 1, 11, "expected '<'"),
        ("root ::= " + "(" * (MAX_NESTED_GROUPS + 1), 1, 110, "groups nest"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_place(text, line, column, problem):
    with pytest.raises(GrammarSyntaxError) as refusal:
        parsed(text)
    assert problem in str(refusal.value)
    assert (refusal.value.line, refusal.value.column) == (line, column)
    assert f"line {line}, column {column}: " in str(refusal.value)
