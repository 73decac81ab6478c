"""Looking ahead in a grammar and stepping back leaves no trace: drafts are checked that way."""

from random import Random

import numpy as np
import pytest
from golden import tool_format
from grammar_driver import tool_grammar
from tool_replies import TOOLS
from tool_walks import TinyVocabulary

from backend.core.guide import Thought
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.composition import after_thought
from backend.sampling.grammar.schema import schema_to_lark
from backend.sampling.grammar.tool_parameters import CallRule

VOCABULARY = TinyVocabulary(("<think>", "</think>", "<tool_call>", "</tool_call>"))
SCHEMA = (
    '{"type":"object","properties":{"temperature":{"enum":["warm","cold"]},"n":{"type":"integer"}},'
    '"required":["temperature","n"],"additionalProperties":false}'
)
CALLS = tool_grammar(
    tool_format("hermes_json"), TOOLS, CallRule(least=1, has_text=False), VOCABULARY
)
GRAMMARS = {
    "schema": schema_to_lark(SCHEMA),
    "calls": after_thought(CALLS, Thought(starts=("<think>",), ends=("</think>",)), VOCABULARY),
}


def allowed(matcher):
    row = np.full(VOCABULARY.mask_words, -1, np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def going_on(matcher):
    """Return the tokens that may come next and do not end the reply."""
    return [token_id for token_id in allowed(matcher) if token_id not in VOCABULARY.eos_ids]


def look_ahead(matcher, said, rng):
    """Look ahead and step back, as the check of a draft does."""
    assert matcher.count_allowed(matcher.forced()) == len(matcher.forced())
    matcher.count_allowed([rng.choice(said or [9]) for _ in range(4)])
    steps = 0
    for _ in range(rng.randint(0, 5)):
        if not (choices := going_on(matcher)):
            break
        assert matcher.consume(rng.choice(choices))
        steps += 1
    matcher.step_back(steps)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_matcher_that_looked_ahead_is_where_it_was(name):
    compiled = GrammarCompiler(VOCABULARY).compile(GRAMMARS[name])
    for seed in range(25):
        rng, said = Random(seed), []
        matcher, plain = compiled.matcher(), compiled.matcher()
        for _ in range(60):
            look_ahead(matcher, said, rng)
            assert allowed(matcher) == allowed(plain)
            if not (choices := going_on(plain)):
                break
            token_id = rng.choice(choices)
            assert matcher.consume(token_id)
            assert plain.consume(token_id)
            said.append(token_id)
        assert matcher.error is None


def test_names_and_keys_are_forced():
    matcher = GrammarCompiler(VOCABULARY).compile(GRAMMARS["schema"]).matcher()
    text = b""
    while tokens := matcher.forced():
        text += bytes(tokens)
        assert all(map(matcher.consume, tokens))
    assert text == b'{"temperature":"'
