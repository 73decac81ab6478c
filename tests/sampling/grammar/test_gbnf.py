"""From a well-formed text to a grammar: refusals, and the cuts into terminals."""

import pytest
from grammar_driver import accepts, compile_text, walk

from backend.errors import GrammarError, GrammarSyntaxError
from backend.sampling.grammar.gbnf import MAX_BLANKS, MAX_LINE_BREAKS, gbnf_to_lark
from backend.sampling.grammar.vocabulary import Vocabulary

# One character per terminal: neither a literal of two nor a class that repeats in the lexer.
ARITHMETIC = """
root ::= (expression "=" space term "\\n")+
expression ::= term ([-+*/] term)*
term ::= [a-z] [a-z0-9]* space | "(" space expression ")" space
space ::= [ \\t\\n]*
"""


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("root ::= a\nb ::= c", 1, 10, "no rule 'a'"),
        ('root ::= "x"\nb ::= (\n"y" c?)', 3, 5, "no rule 'c'"),
        ('x ::= "a"\nroot ::= root "a" | "b"', 2, 1, "'root' is left-recursive"),
        ('root ::= a\na ::= b "x"\nb ::= a | "y"', 2, 1, "'a' is left-recursive"),
        ('root ::= "x"? root | "y"', 1, 1, "'root' is left-recursive"),
        ('root ::= "x"\na ::= e a\ne ::= | "b"', 2, 1, "'a' is left-recursive"),
        ('root ::= ("x" | root)', 1, 1, "'root' is left-recursive"),
        ("root ::= root", 1, 1, "'root' is left-recursive"),
        ('root ::= "x" ("a"?)*', 1, 14, "may be empty"),
        ('root ::= "a"?*', 1, 10, "may be empty"),
        ('root ::= ("a"* "b"*)+', 1, 10, "may be empty"),
        ('root ::= e{2,}\ne ::= ""', 1, 10, "may be empty"),
        ("root ::= <nothing>", 1, 10, "<nothing> is not a token"),
        ("root ::= <[258]>", 1, 10, "258 is not a token"),
    ],
)
def test_a_meaningless_grammar_is_refused_with_its_place(text, line, column, problem, vocabulary):
    with pytest.raises(GrammarSyntaxError, match=problem) as refusal:
        gbnf_to_lark(text, vocabulary)
    assert (refusal.value.line, refusal.value.column) == (line, column)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no rule 'root'"),
        ("# nothing", "no rule 'root'"),
        ('Root ::= "a"', "no rule 'root'"),
        ('root ::= "a" root', "no text can complete it"),
        ('root ::= a\na ::= "(" a ")"', "no text can complete it"),
        (r"root ::= [\ud800]", "no text can complete it"),
        (r'root ::= "a" [\ud800-\udfff]', "no text can complete it"),
    ],
)
def test_a_grammar_without_a_root_or_an_end_is_refused(text, problem, vocabulary):
    with pytest.raises(GrammarError, match=problem):
        gbnf_to_lark(text, vocabulary)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" | "b"\nunused ::= ("(" unused ")")?',
        "root ::= a\na ::= [0-9] a | [0-9]",
        'root ::= space "x"\nspace ::= ([ \\t] space)?',
        'root ::= "a" | "b" ("c" | "d" (root | "e" root)?)',
        'root ::= "a" | "(" root',
    ],
)
def test_recursion_at_the_end_only_is_a_repetition_and_so_one_terminal(text, vocabulary):
    assert gbnf_to_lark(text, vocabulary).start == "T0"


def test_json_is_cut_into_terminals_whose_ends_are_certain(vocabulary):
    text = 'root ::= [0-9]+ | "[" (root ("," root)*)? "]" | "null"'
    assert '"null"' in "\n".join(gbnf_to_lark(text, vocabulary).definitions)


def test_a_grammar_whose_cuts_are_uncertain_is_cut_into_characters(compiler, vocabulary):
    lark = gbnf_to_lark(ARITHMETIC, vocabulary)
    assert not any(line.startswith("T") for line in lark.definitions)
    compiled = compiler.compile(lark)
    assert accepts(compiled, "ab=(c)\n")
    assert accepts(compiled, "ab \n=\n((c*d) -e)\n\n\nf=g\n")
    assert not accepts(compiled, "ab=\n")


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ('root ::= w "ing"\nw ::= [a-z]+', "walking"),
        ('root ::= w "ing" | "(" root ")"\nw ::= [a-z]+', "((walking))"),
        ('root ::= "a"* "ab"', "aaab"),
        ('root ::= ("ab" | "a") ("c" | "bc") root?', "abcabbcac"),
        ('root ::= "true" | w\nw ::= [a-z]+ ("(" w ")")?', "true(truex)"),
        ('root ::= "x" ("ab"){2} ("(" root ")")?', "xabab(xabab)"),
        ('root ::= "x" ("ab"){0,2} ("(" root ")")?', "xabab(xab(x))"),
    ],
)
def test_no_end_of_a_terminal_is_missed(text, reply, compiler):
    assert accepts(compile_text(compiler, text), reply)


@pytest.mark.parametrize(
    "space",
    [r"[ \t\n]*", r"([ \t\n] ws)?", r'(" " | "\t" | "\n")*', r"[ \t\r\n]+", r"[\n ]+ | [ \n]*"],
)
def test_space_of_any_length_ends_before_a_model_writes_nothing_else(space, compiler):
    compiled = compile_text(compiler, f'root ::= "[" ws ("1" ws)* "]" ws\nws ::= {space}\n')
    line = "\n" + " " * MAX_BLANKS
    assert accepts(compiled, f"[{line}1 1\n\n]" + MAX_LINE_BREAKS * line)
    for longer in (MAX_LINE_BREAKS * line + "\n\n", "\n  " + " " * MAX_BLANKS):
        assert not accepts(compiled, f"[ 1 ]{longer}")


@pytest.mark.parametrize("text", [r"[ ]*", r"[\n]+", r"[ \n\x0B]*", r"[ \n]{2,}", r"[ \n]{0,99}"])
def test_other_repetitions_stay_as_long_as_they_are_written(text, compiler):
    compiled = compile_text(compiler, f'root ::= "a" {text} "b"')
    character = "\n" if text == r"[\n]+" else " "
    assert accepts(compiled, f"a{character * 90}b")


def test_parts_that_cannot_end_are_left_out(compiler):
    compiled = compile_text(compiler, 'root ::= "a" | b\nb ::= "b" b | "c"? d\nd ::= "d" b')
    assert accepts(compiled, "a")
    assert walk(compiled.matcher(), "b") == 0


def test_a_vocabulary_that_cannot_express_a_grammar_is_an_error():
    letters = Vocabulary([b"a", b"b", b"ab", b"<eos>"], markers={}, eos_ids=[3], size=4)
    with pytest.raises(GrammarError, match="vocabulary cannot express it"):
        gbnf_to_lark('root ::= "a" "é"', letters)
    with pytest.raises(GrammarError, match="vocabulary cannot express it"):
        gbnf_to_lark("root ::= [c-z]+", letters)


def test_what_a_vocabulary_cannot_express_is_left_out():
    letters = Vocabulary([b"a", b"b", b"ab", b"<eos>"], markers={}, eos_ids=[3], size=4)
    lark = gbnf_to_lark('root ::= [a-z] | "c" root | "b" "é"?', letters)
    assert lark.definitions == (r'T0: /[\x{61}-\x{62}]/ | "b"',)


def test_names_and_the_order_of_rules_do_not_change_the_grammar(vocabulary):
    one = 'root ::= a b\na ::= "x" | b\nb ::= ("y" "z")+'
    other = 'second ::= ("y" "z")+\nfirst ::= "x" | second\nroot ::= first second\nrest ::= "a"'
    assert gbnf_to_lark(one, vocabulary) == gbnf_to_lark(other, vocabulary)


def test_a_token_reference_is_one_token(compiler, vocabulary):
    (marker,) = vocabulary.markers.values()
    compiled = compile_text(compiler, 'root ::= "a" <tool_call> "b"* | "c" !<[98]> "d"')
    for tokens in ([97, marker, 98, 98], [99, 97, 100], [99, marker, 100]):
        matcher = compiled.matcher()
        assert all(map(matcher.consume, tokens))
        assert matcher.is_accepting
    for tokens in ([97, 60], [99, 98], [99, *vocabulary.eos_ids]):
        matcher = compiled.matcher()
        assert not all(map(matcher.consume, tokens))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "<tool_call>\\n" [a-z]+',
        'root ::= ("<tool_call>\\n" [a-z]+ | .*)',
        'root ::= "<tool_call>\\n" value\nvalue ::= "(" value ")" | [a-z]+',
    ],
)
def test_a_marker_at_the_start_may_be_its_token_or_spelled(text, compiler, vocabulary):
    compiled = compile_text(compiler, text)
    assert accepts(compiled, "<tool_call>\nabc")
    matcher = compiled.matcher()
    assert all(map(matcher.consume, [vocabulary.markers["<tool_call>"], *b"\nabc"]))
    assert matcher.is_accepting
