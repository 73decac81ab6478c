"""Thoughts are never longer than their budget, whatever the model would write."""

import re
from random import Random

import numpy as np
import pytest
from golden import named_format, play
from tool_walks import END, TinyVocabulary, is_whole, tokens_of

from backend.core.guide import Thought, ThoughtBudget
from backend.formats.registry import REASONING_FORMATS
from backend.output.reply import ReplySpec
from backend.output.reply_format import thought_texts
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.composition import after_thought
from backend.sampling.grammar.schema import schema_to_lark
from backend.sampling.grammar.thought_budget import BudgetedGrammar
from backend.sampling.grammar.thought_marks import ThoughtMarks

# The tool formats of the families whose thoughts have a format of their own.
TOOLS = {
    "harmony": "harmony",
    "inkling_thinking": "inkling",
    "solar_think": "solar_open",
    "xtml_think": "kimi_k3",
    "muse": "muse_spark",
    "mm_think": "minimax_m3",
    "gemma4_channel": "gemma4",
    "longcat_think": "longcat",
    "seed_think": "seed_oss",
    "cohere_think": "cohere",
    "apertus_inner": "apertus",
    "mistral_think": "mistral",
}
FAMILIES = {
    thoughts.name: named_format(TOOLS.get(thoughts.name, "hermes_json"), thoughts.name)
    for thoughts in REASONING_FORMATS
    if thoughts.starts
}
THINK = FAMILIES["think"]
LETTERS = "ab c\n`<"


class TinyTokenizer:
    """The tokens of a tiny vocabulary: markers, and single bytes."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
        self.added_texts = {token_id: text for text, token_id in vocabulary.markers.items()}

    def encode(self, text, *, adds_special):  # noqa: ARG002 (there are none)
        return tokens_of(text, self.vocabulary)

    def token_bytes(self, token_id):
        return self.vocabulary.pieces[token_id]


def vocabulary_of(family, *, is_spelled):
    """Return a vocabulary in which the atoms of a family's markers are tokens, or words."""
    texts = sorted({text for text in (*family.markers, family.reasoning.answer) if text})
    tokens = family.reasoning.tokens
    atoms = [t for t in texts if not (" " in t or any(a in t and a != t for a in tokens))]
    atoms = sorted({*atoms, *tokens})
    rests = {part for text in texts for part in re.split("|".join(map(re.escape, atoms)), text)}
    words = sorted(filter(None, rests))
    return TinyVocabulary(words=[*atoms, *words]) if is_spelled else TinyVocabulary(atoms, words)


def guided(family, vocabulary, tokens, *, is_open=False, is_first=False, grammar=None):
    texts = thought_texts(family, has_tools=False)
    marks = ThoughtMarks(texts, TinyTokenizer(vocabulary), len(vocabulary.pieces))
    budget = ThoughtBudget(tokens=tokens, texts=texts, is_open=is_open, is_first=is_first)
    return BudgetedGrammar(budget, marks, grammar)


def allowed_by(matcher, vocabulary):
    row = np.zeros(vocabulary.mask_words, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: len(vocabulary.pieces)]).tolist()


def units_of(family, vocabulary):
    """Return the units that a model may write: marks and words, or whole heads of messages."""
    reasoning = family.reasoning
    if not reasoning.answer:
        return [[token] for token in range(END + 1, len(vocabulary.pieces) - 10)]
    after = reasoning.end + reasoning.bridge
    heads = [after + reasoning.start, after + reasoning.answer]
    return [tokens_of(text, vocabulary) for text in heads]


def babble(matcher, family, vocabulary, random, *, steps, begins):
    """Return the tokens of a model that writes marks and letters as they come."""
    units, letters = units_of(family, vocabulary), [[byte] for byte in LETTERS.encode()]
    drawn = []
    while len(drawn) < steps or matcher.forced():
        ways = [begins] if begins and not drawn else random.choice([units, letters, letters])
        ways = [unit for unit in ways if matcher.count_allowed(unit) == len(unit)]
        if not ways and (forced := matcher.forced()):
            ways = [forced]
        for token in random.choice(ways or letters[:1]):
            assert token in allowed_by(matcher, vocabulary)
            assert matcher.consume(token)
            drawn.append(token)
    return drawn


def thought_of(family, text, *, is_open):
    tail = family.reasoning.start if is_open else ""
    spec = ReplySpec(format=family, prompt_tail=f"<|im_start|>assistant\n{tail}")
    return play(spec, [text]).reasoning


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("is_spelled", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(3)
def test_no_reply_holds_more_tokens_of_thought_than_the_budget(name, is_spelled, is_open):
    family, random = FAMILIES[name], Random(name)
    vocabulary = vocabulary_of(family, is_spelled=is_spelled)
    words = {word.decode() for word in vocabulary.pieces[END + 1 : -10]}
    # A thought is shown without the space at its end.
    words |= {word.rstrip() for word in words}
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    one_word = re.compile("|".join(map(re.escape, longest_first)))
    thoughts = 0
    for tokens in (0, 1, 3, 9, 30, 9, 3, 1):
        matcher = guided(family, vocabulary, tokens, is_open=is_open).matcher()
        heads = () if is_open else (family.reasoning.start, family.reasoning.answer)
        begins = tokens_of(random.choice(heads), vocabulary) if heads else []
        drawn = babble(matcher, family, vocabulary, random, steps=60, begins=begins)
        text = b"".join(vocabulary.pieces[token] for token in drawn).decode()
        thought = thought_of(family, text, is_open=is_open)
        assert len(one_word.sub("*", thought)) <= tokens, (tokens, text)
        thoughts += bool(thought)
    assert thoughts


def consumed(matcher, vocabulary, text):
    """Let a matcher move over a text; return whether it allowed all of it."""
    allowed = [matcher.consume(token) for token in tokens_of(text, vocabulary)]
    return all(allowed)


def forced_text(matcher, vocabulary):
    return b"".join(vocabulary.pieces[token] for token in matcher.forced()).decode()


IDS, SPELLED = (vocabulary_of(THINK, is_spelled=spelled) for spelled in (False, True))
both_vocabularies = pytest.mark.parametrize("vocabulary", [IDS, SPELLED], ids=["ids", "text"])


@both_vocabularies
def test_the_end_comes_when_the_tokens_are_used_up_and_then_anything(vocabulary):
    matcher = guided(THINK, vocabulary, 5, is_open=True).matcher()
    assert consumed(matcher, vocabulary, "four")
    assert not matcher.forced()
    assert consumed(matcher, vocabulary, "!")
    end = tokens_of("</think>", vocabulary)
    assert matcher.forced() == end
    for token in end:
        assert allowed_by(matcher, vocabulary) == [token]
        assert matcher.consume(token)
    assert ord("a") in allowed_by(matcher, vocabulary)
    assert END in allowed_by(matcher, vocabulary)


@both_vocabularies
def test_no_tokens_are_no_thought(vocabulary):
    opened = guided(THINK, vocabulary, 0, is_open=True).matcher()
    assert forced_text(opened, vocabulary) == "</think>"
    closed = guided(THINK, vocabulary, 0).matcher()
    assert not closed.forced()
    word = vocabulary.pieces.index(b"<think>")
    assert word not in allowed_by(closed, vocabulary)
    assert set(allowed_by(closed, vocabulary)) == set(range(len(vocabulary.pieces))) - {word}


@both_vocabularies
def test_tokens_are_not_waited_for_while_nothing_can_be_forced(vocabulary):
    matcher = guided(THINK, vocabulary, 3, is_open=True).matcher()
    seen = [matcher.may_force]
    for token in [*b"abc", *tokens_of("</think>", vocabulary), *b"de"]:
        assert matcher.consume(token)
        seen.append(matcher.may_force)
    ends = len(tokens_of("</think>", vocabulary))
    assert seen == [False, False, *[True] * (1 + ends), *[False] * 3]


def test_a_start_that_was_spelled_when_nothing_is_left_is_closed_at_once():
    matcher = guided(THINK, SPELLED, 0).matcher()
    assert consumed(matcher, SPELLED, "<think>")
    assert forced_text(matcher, SPELLED) == "</think>"


@pytest.mark.parametrize("begun", range(1, len("</think>")))
def test_an_end_that_the_model_has_begun_to_spell_is_completed(begun):
    matcher = guided(THINK, SPELLED, 10 + begun, is_open=True).matcher()
    assert consumed(matcher, SPELLED, "a < b so. " + "</think>"[:begun])
    assert forced_text(matcher, SPELLED) == "</think>"[begun:]


def test_an_end_that_is_one_token_is_written_whole():
    matcher = guided(THINK, IDS, 3, is_open=True).matcher()
    for byte in b"</t":
        assert matcher.consume(byte)
    assert matcher.forced() == [IDS.markers["</think>"]]


def test_an_end_is_completed_from_the_middle_of_a_character():
    family = FAMILIES["kimi_think"]
    vocabulary = vocabulary_of(family, is_spelled=True)
    end = family.reasoning.end.encode()
    for begun in range(1, len(end)):
        matcher = guided(family, vocabulary, begun, is_open=True).matcher()
        for byte in end[:begun]:
            matcher.consume(byte)
        rest = b"".join(vocabulary.pieces[token] for token in matcher.forced())
        assert rest == end[begun:]


def test_all_thoughts_of_a_reply_share_the_budget():
    matcher = guided(THINK, IDS, 6).matcher()
    assert consumed(matcher, IDS, "<think>four</think>Text.</tool_call>\n<think>ab")
    assert forced_text(matcher, IDS) == "</think>"
    assert consumed(matcher, IDS, "</think>")
    assert IDS.markers["<think>"] not in allowed_by(matcher, IDS)


def test_a_line_break_in_the_token_that_opens_a_thought_is_none_of_it():
    vocabulary = TinyVocabulary(words=["<think>", "</think>", ">\n", ">So"])
    for word, left in [(b">\n", 2), (b">So", 1)]:
        matcher = guided(THINK, vocabulary, 2).matcher()
        assert consumed(matcher, vocabulary, "<think")
        assert matcher.consume(vocabulary.pieces.index(word))
        assert consumed(matcher, vocabulary, "abc"[: left - 1])
        assert not matcher.forced()
        assert matcher.consume(ord("d"))
        assert forced_text(matcher, vocabulary) == "</think>"


@pytest.mark.parametrize(
    ("text", "is_thought"),
    [
        ("Write `<think>` and", False),
        ("See:\n```\n<think>", False),
        ("It`s\n<think>", False),
        ("Well. <think>", False),
        ("a `b` <think>", True),
        ("</tool_call>\n<think>", True),
        ("```\n<think>", True),
    ],
)
def test_a_start_in_code_or_in_content_is_text(text, is_thought):
    matcher = guided(THINK, IDS, 4).matcher()
    assert consumed(matcher, IDS, text + "wxyz")
    assert bool(matcher.forced()) is is_thought


def test_nothing_counts_after_the_first_part_where_a_grammar_rules_the_rest():
    matcher = guided(THINK, IDS, 2, is_first=True).matcher()
    assert consumed(matcher, IDS, "<think>a</think>{<think>long enough")
    assert not matcher.forced()
    answer = guided(THINK, IDS, 2, is_first=True).matcher()
    assert consumed(answer, IDS, "\n{<think>long enough")
    assert not answer.forced()


def test_a_model_of_messages_begins_no_thought_when_nothing_is_left():
    family = FAMILIES["harmony"]
    vocabulary = vocabulary_of(family, is_spelled=False)
    matcher = guided(family, vocabulary, 0).matcher()
    assert matcher.count_allowed(tokens_of(family.reasoning.start, vocabulary)) == 1
    assert consumed(matcher, vocabulary, "<|channel|>")
    allowed = allowed_by(matcher, vocabulary)
    barred = {vocabulary.pieces[i] for i in range(len(vocabulary.pieces)) if i not in allowed}
    assert barred == {b"a", b"analysis"}
    assert consumed(matcher, vocabulary, "final<|message|>an answer")


def test_a_family_says_its_own_words_within_the_budget():
    family = FAMILIES["seed_think"]
    vocabulary = vocabulary_of(family, is_spelled=False)
    parting = tokens_of(family.reasoning.parting, vocabulary)
    assert b"exhausted my token budget" in b"".join(vocabulary.pieces[i] for i in parting)
    for tokens in (2 * len(parting) - 1, 2 * len(parting)):
        matcher = guided(family, vocabulary, tokens, is_open=True).matcher()
        thought = 0
        while not matcher.forced():
            assert matcher.consume(ord("a"))
            thought += 1
        says_it = tokens == 2 * len(parting)
        assert thought == tokens - len(parting) * says_it
        end = tokens_of("</seed:think>", vocabulary)
        assert matcher.forced() == [*parting * says_it, *end]


def test_words_for_which_nothing_is_left_are_not_said():
    family = FAMILIES["seed_think"]
    vocabulary = vocabulary_of(family, is_spelled=False)
    parting = tokens_of(family.reasoning.parting, vocabulary)
    matcher = guided(family, vocabulary, 3 * len(parting), is_open=True).matcher()
    assert consumed(matcher, vocabulary, "a" * (2 * len(parting)))
    assert consumed(matcher, vocabulary, family.reasoning.parting + "</seed:think>}")
    for byte in b"<seed:think>":
        assert matcher.consume(byte)
    assert forced_text(matcher, vocabulary) == "</seed:think>"


@both_vocabularies
def test_it_goes_back_over_drafts_and_goes_on_where_another_process_ended(vocabulary):
    random = Random(8)
    for _ in range(20):
        tokens = random.randrange(12)
        grammar = guided(THINK, vocabulary, tokens)
        matcher, twin = grammar.matcher(), grammar.matcher()
        assert matcher.consume(ord("\n"))
        drawn = [ord("\n"), *babble(matcher, THINK, vocabulary, random, steps=40, begins=[])]
        for token in drawn:
            before = allowed_by(twin, vocabulary)
            tried = babble_ahead(twin, vocabulary, random)
            twin.step_back(tried)
            assert allowed_by(twin, vocabulary) == before
            assert twin.count_allowed([token]) == 1
            assert twin.consume(token)
        assert allowed_by(twin, vocabulary) == allowed_by(matcher, vocabulary)


def babble_ahead(matcher, vocabulary, random):
    """Move over a few allowed tokens; return how many."""
    count = random.randrange(8)
    for _ in range(count):
        forced = matcher.forced()
        allowed = [token for token in allowed_by(matcher, vocabulary) if token != END]
        assert matcher.consume(forced[0] if forced else random.choice(allowed))
    return count


@both_vocabularies
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_the_grammar_begins_after_a_thought_that_was_broken_off(vocabulary, is_open):
    random = Random(3)
    thought = Thought(starts=("<think>",), ends=("</think>",), is_open=is_open)
    rule = after_thought(schema_to_lark('{"type":"boolean"}'), thought, vocabulary)
    compiled = GrammarCompiler(vocabulary).compile(rule)
    for tokens in (0, 1, 2, 7):
        grammar = guided(
            THINK, vocabulary, tokens, is_open=is_open, is_first=True, grammar=compiled
        )
        matcher, text = grammar.matcher(), b""
        if not is_open:
            text = b"<think>" if tokens else b""
            assert consumed(matcher, vocabulary, text.decode())
        while not matcher.forced() and (is_open or tokens):
            letter = random.choice(b"ab {")
            assert matcher.consume(letter)
            text += bytes([letter])
        answer = "</think>\n\ntrue" if is_open or tokens else "true"
        assert consumed(matcher, vocabulary, answer)
        assert matcher.error is None
        assert is_whole(compiled, text.decode() + answer, vocabulary)


def test_a_grammar_that_does_not_know_the_thought_wins():
    answer = GrammarCompiler(SPELLED).compile(schema_to_lark('{"const": "<think>abcdefgh"}'))
    matcher = guided(THINK, SPELLED, 2, grammar=answer).matcher()
    assert consumed(matcher, SPELLED, '"<think>abcdefgh"')
    assert matcher.error is None


@both_vocabularies
def test_no_character_is_cut_by_the_end_of_a_budget(vocabulary):
    thought = Thought(starts=("<think>",), ends=("</think>",), is_open=True)
    rule = after_thought(schema_to_lark('{"type":"boolean"}'), thought, vocabulary)
    compiled = GrammarCompiler(vocabulary).compile(rule)
    random = Random(6)
    for tokens in range(1, 20):
        for inner in (None, compiled):
            options = {"is_open": True, "is_first": True, "grammar": inner}
            matcher = guided(THINK, vocabulary, tokens, **options).matcher()
            text = b""
            while not matcher.forced():
                whole = random.choice("aé€😀").encode()
                if matcher.count_allowed(list(whole)) == len(whole):
                    assert all(map(matcher.consume, whole))
                    text += whole
            assert len(text) == tokens
            allowed = guided(THINK, vocabulary, tokens, **options).matcher()
            cut = [b for b in range(0xC2, 0xF5) if b not in allowed_by(allowed, vocabulary)]
            least = {1: 0xC2, 2: 0xE0, 3: 0xF0}.get(tokens, 0xF5)
            assert cut == list(range(least, 0xF5))
