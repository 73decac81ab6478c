import json
from random import Random

import numpy as np
import pytest
from grammar_driver import compile_text

from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.vocabulary import Vocabulary

WORDS = [
    b"true",
    b"null",
    b'{"',
    b'":',
    b'","',
    b"ab",
    b"a",
    b"b\xc3",
    b"\xa9",
    b"12",
    b"  ",
    b"}}",
]


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    """Bytes, longer tokens that cross the terminals of JSON and the bytes of a character."""
    pieces = [bytes([byte]) for byte in range(256)] + WORDS + [b"</s>", b"<|end|>", b"", b"<tool>"]
    first = 256 + len(WORDS)
    return Vocabulary(
        pieces, markers={"<tool>": first + 3}, eos_ids=[first, first + 1], size=len(pieces) + 50
    )


def allowed(matcher, vocabulary):
    row = np.full(vocabulary.mask_words, -1, np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def replayed(compiled, tokens):
    matcher = compiled.matcher()
    assert all(map(matcher.consume, tokens))
    return matcher


TEXTS = {
    "schema": '{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"array"}}}',
    "json": 'root ::= [0-9]+ | "{" ("\\"" [^"\\\\]* "\\":" root)? "}" | "null" | "true"',
    "words": 'root ::= [a-zé]+ ("," [a-zé]+)*',
    "characters": 'root ::= "a" [a-b]* "b" | "(" root ")" [a-z]*',
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_token_of_the_mask_may_be_consumed_and_no_other(name, words):
    compiled = compile_text(GrammarCompiler(words), TEXTS[name])
    random = Random(7)
    for _ in range(15):
        matcher, consumed = compiled.matcher(), []
        for _ in range(10):
            tokens = allowed(matcher, words)
            assert words.eos_ids.isdisjoint(tokens) != matcher.is_accepting
            assert words.eos_ids <= {*tokens} or words.eos_ids.isdisjoint(tokens)
            refused = [token for token in range(words.mask_words * 32) if token not in tokens]
            assert not replayed(compiled, consumed).consume(random.choice(refused))
            consumed.append(random.choice(tokens))
            assert matcher.consume(consumed[-1])
            if consumed[-1] in words.eos_ids:
                break
        assert matcher.error is None


def test_what_a_schema_lets_through_is_json(words):
    compiled = compile_text(GrammarCompiler(words), TEXTS["schema"])
    random = Random(3)
    complete = 0
    for _ in range(40):
        matcher, text = compiled.matcher(), b""
        for _ in range(60):
            token = random.choice(allowed(matcher, words))
            matcher.consume(token)
            if token in words.eos_ids:
                assert isinstance(json.loads(text), dict)
                complete += 1
                break
            text += bytes([token]) if token < 256 else WORDS[token - 256]
    assert complete > 10


def test_a_reply_that_is_complete_may_only_end(words):
    matcher = compile_text(GrammarCompiler(words), 'root ::= "ab"').matcher()
    assert not matcher.is_accepting
    assert matcher.consume(ord("a"))
    assert matcher.consume(ord("b"))
    assert matcher.is_accepting
    assert matcher.is_stopped
    assert allowed(matcher, words) == sorted(words.eos_ids)
    assert matcher.error is None
    assert matcher.consume(min(words.eos_ids))
    assert matcher.is_stopped
    assert matcher.error is None


def test_a_reply_that_may_go_on_or_end_is_not_stopped(words):
    matcher = compile_text(GrammarCompiler(words), 'root ::= "c"+').matcher()
    matcher.consume(ord("c"))
    assert matcher.is_accepting
    assert not matcher.is_stopped
    assert set(allowed(matcher, words)) == {ord("c"), *words.eos_ids}


@pytest.mark.parametrize("token", [ord("x"), 10_000, 1 << 31])
def test_a_wrong_token_is_an_error_that_stays_and_never_raises(token, words):
    matcher = compile_text(GrammarCompiler(words), 'root ::= "ab"').matcher()
    assert not matcher.consume(token)
    assert matcher.error
    assert "\n" not in matcher.error
    assert not matcher.consume(ord("a"))
    assert matcher.is_stopped
    assert not matcher.is_accepting
    assert allowed(matcher, words) == sorted(words.eos_ids)


def test_a_token_after_the_end_is_an_error(words):
    matcher = compile_text(GrammarCompiler(words), 'root ::= "a"').matcher()
    matcher.consume(ord("a"))
    matcher.consume(min(words.eos_ids))
    assert not matcher.consume(ord("a"))
    assert matcher.error


def test_markers_are_no_text(words):
    compiled = compile_text(GrammarCompiler(words), 'root ::= "x" .*')
    matcher = replayed(compiled, [ord("x")])
    assert words.markers["<tool>"] not in allowed(matcher, words)
    assert ord("<") in allowed(matcher, words)


def test_a_dead_end_is_an_error():
    # The vocabulary writes every byte of the text, but not in these pieces.
    pieces = [b"a", b"b\xc3", b"\xa9\xc3", b"</s>"]
    vocabulary = Vocabulary(pieces, markers={}, eos_ids=[3], size=4)
    matcher = compile_text(GrammarCompiler(vocabulary), 'root ::= "abé"').matcher()
    assert matcher.consume(0)
    assert matcher.consume(1)
    assert allowed(matcher, vocabulary) == [3]
    assert matcher.error
    assert not matcher.is_accepting


def digits_taken(schema, begin, words, step=b"7"):
    """Return how many more digits a reply may take that goes on with digits wherever it can."""
    matcher = compile_text(GrammarCompiler(words), json.dumps(schema)).matcher()
    assert all(map(matcher.consume, begin))
    token = words.pieces.index(step)
    count = 0
    while count < 100 and token in allowed(matcher, words):
        assert matcher.consume(token)
        count += len(step)
    return count


def test_a_number_takes_forty_digits_and_then_its_end(words):
    schema, begin = {"type": "number"}, b"10."
    assert digits_taken(schema, begin, words) == 40
    assert digits_taken(schema, begin, words, step=b"12") == 40
    matcher = compile_text(GrammarCompiler(words), json.dumps(schema)).matcher()
    assert all(map(matcher.consume, begin + b"7" * 40))
    assert {words.pieces[token] for token in allowed(matcher, words)} >= {b"e", b"E"}
    matcher.step_back(1)
    assert ord("7") in allowed(matcher, words)


@pytest.mark.parametrize("begin", [b"1e", b"1.5E-"])
def test_an_exponent_takes_two_digits(begin, words):
    assert digits_taken({"type": "number"}, begin, words) == 2
    assert digits_taken({"type": "number"}, begin, words, step=b"12") == 2
    assert digits_taken({"type": "number"}, begin + b"1", words, step=b"12") == 0


@pytest.mark.parametrize(
    ("schema", "begin"),
    [({"type": "string"}, b'"'), ({"type": "string", "pattern": "^[0-9]{100}$"}, b'"')],
)
def test_a_text_takes_any_number_of_digits(schema, begin, words):
    assert digits_taken(schema, begin, words) == 100


UUID = b"123e4567-1e12-4e1e-8e12-1e1234567e12"


@pytest.mark.parametrize("schema", [{"format": "uuid"}, {"pattern": "^[0-9A-F]{50}$"}])
def test_hexadecimal_digits_are_those_of_a_text(schema, words):
    compiled = compile_text(GrammarCompiler(words), json.dumps({"type": "string", **schema}))
    matcher, text = compiled.matcher(), UUID if "format" in schema else b"1E123" * 10
    for byte in b'"' + text + b'"':
        assert byte in allowed(matcher, words)
        assert matcher.consume(byte)
    assert matcher.is_accepting
