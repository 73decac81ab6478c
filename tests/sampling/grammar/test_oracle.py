"""The GBNF front end against an oracle that tries every derivation."""

from random import Random

import pytest
from gbnf_oracle import Alt, Class, Oracle, Ref, Rep, Seq, Text, written
from grammar_driver import compile_text, walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.errors import GrammarError

pytestmark = pytest.mark.slow

NAMES = ("root", "one", "two-2", "Two")
# About one grammar in four is refused; 1,200 pairs of a grammar and a text remain.
TEXTS_PER_GRAMMAR = 10

characters = st.sampled_from('aabbc0 \n"\\]-^é中😀')
texts = st.text(characters, max_size=4).map(Text)
ranges = st.tuples(characters, characters).map(lambda pair: (min(pair), max(pair)))
classes = st.builds(
    Class, st.lists(ranges, min_size=1, max_size=3).map(tuple), st.booleans()
).filter(lambda c: not (c.is_negated and not c.holds('"') and not c.holds("\\")))
any_character = st.just(Class((), is_negated=True))
counts = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (0, 3), (1, 2), (2, None)])


def nodes(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda items: Seq(tuple(items))),
            st.lists(inner, min_size=1, max_size=3).map(lambda items: Alt(tuple(items))),
            st.builds(lambda item, count: Rep(item, *count), inner, counts),
        ),
        max_leaves=6,
    )


@st.composite
def grammars(draw, recursive: bool):
    """Rules that refer to later ones, and after a character to any."""
    used = NAMES[: draw(st.integers(1, len(NAMES)))]
    rules = {}
    for index, name in enumerate(used):
        leaves = [texts, classes, any_character]
        if used[index + 1 :]:
            leaves.append(st.sampled_from(used[index + 1 :]).map(Ref))
        if recursive:
            leaves.append(st.sampled_from(used).map(lambda name: Seq((Text("a"), Ref(name)))))
        rules[name] = draw(nodes(st.one_of(leaves)))
    if recursive:
        nested = Seq((Text("("), Ref(draw(st.sampled_from(used))), draw(nodes(classes | texts))))
        rules["root"] = Alt((rules["root"], Seq((nested, Text(")"), draw(nodes(classes | texts))))))
    return rules


def spoiled(random, text):
    """Change, drop or add a character."""
    at, dropped = random.randint(0, len(text)), random.randint(0, 1)
    return text[:at] + random.choice(["", "a", "b", "(", ")", "0", "é"]) + text[at + dropped :]


def check(rules, seed, compiler):
    oracle, text = Oracle(rules), written(rules)
    try:
        compiled = compile_text(compiler, text)
    except GrammarError:
        assert oracle.derives_nothing() or oracle.repeats_nothing_forever()
        return
    assert not oracle.repeats_nothing_forever()
    random = Random(seed)
    for number in range(TEXTS_PER_GRAMMAR):
        reply = oracle.sentence(random) or ""
        if number % 2:
            reply = spoiled(random, reply)
        matcher = compiled.matcher()
        taken = walk(matcher, reply)
        accepted = taken == len(reply) and matcher.is_accepting
        assert (accepted, taken) == oracle.judge(reply), (text, reply)


fuzz = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@fuzz
@given(rules=grammars(recursive=False), seed=st.integers(0, 1 << 32))
def test_a_grammar_without_recursion_accepts_what_the_oracle_does(rules, seed, compiler):
    check(rules, seed, compiler)


@fuzz
@given(rules=grammars(recursive=True), seed=st.integers(0, 1 << 32))
def test_a_grammar_with_recursion_accepts_what_the_oracle_does(rules, seed, compiler):
    check(rules, seed, compiler)
