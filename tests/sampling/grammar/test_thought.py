"""Grammars after a thought, and from a trigger on."""

from random import Random

import pytest
from golden import named_format, play, tool_format
from grammar_driver import tool_grammar
from tool_replies import FORMATS, TOOLS
from tool_walks import TinyVocabulary, is_whole, walk

from backend.core.guide import Thought
from backend.output.reply import ReplySpec
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.composition import after_thought, after_trigger, translated
from backend.sampling.grammar.schema import schema_to_lark
from backend.sampling.grammar.tool_parameters import CallRule

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOKENS = TinyVocabulary(MARKERS)
SPELLED = TinyVocabulary(words=MARKERS)
THINK = {"starts": ("<think>",), "ends": ("</think>",)}
REQUIRED = CallRule(least=1, has_text=False)
CALL = '<tool_call>\n{"name": "clock_now", "arguments": {}}\n</tool_call>'
BOOLEAN = schema_to_lark('{"type":"boolean"}')
both_vocabularies = pytest.mark.parametrize("vocabulary", [TOKENS, SPELLED], ids=["ids", "text"])


def accepted(grammar, vocabulary, texts):
    compiled = GrammarCompiler(vocabulary).compile(grammar)
    return [text for text in texts if is_whole(compiled, text, vocabulary)]


@both_vocabularies
def test_a_model_may_think_before_it_follows_the_grammar(vocabulary):
    good = ["true", "<think>true</think>false", "<think>\na < b {}\n</think>\n\ntrue", " true"[1:]]
    bad = [
        "<think>true",
        "thinking</think>true",
        "<think>a</think>",
        "<think>a</think>b</think>true",
        "<think>a</think>" + "\n" * 9 + "true",
    ]
    grammar = after_thought(BOOLEAN, Thought(**THINK), vocabulary)
    assert accepted(grammar, vocabulary, good + bad) == good


@both_vocabularies
def test_a_thought_that_the_prompt_opened_is_closed_once(vocabulary):
    good = ["</think>true", "a thought\n</think>\n\ntrue", "true</think>false"]
    bad = ["true", "a</think>b</think>true", "<think>a</think>b", "a"]
    grammar = after_thought(BOOLEAN, Thought(**THINK, is_open=True), vocabulary)
    assert accepted(grammar, vocabulary, good + bad) == good


@both_vocabularies
def test_a_thought_holds_none_of_what_would_end_it(vocabulary):
    grammar = tool_grammar(tool_format("hermes_json"), TOOLS, REQUIRED, vocabulary)
    thought = Thought(**THINK, forbidden=("<tool_call>",))
    texts = [f"<think>a</think>\n{CALL}", CALL, f"<think>a {CALL}</think>{CALL}"]
    assert accepted(after_thought(grammar, thought, vocabulary), vocabulary, texts) == texts[:2]


@both_vocabularies
def test_text_may_follow_a_thought_where_calls_are_free(vocabulary):
    grammar = tool_grammar(tool_format("hermes_json"), TOOLS, CallRule(), vocabulary)
    texts = [
        "Hello.",
        "<think>a</think>\n\nHello.",
        f"<think>a</think>\n\nHello.\n{CALL}",
        f"<think>a</think>{CALL}\n{CALL}",
    ]
    after = after_thought(grammar, Thought(**THINK), vocabulary)
    wrong = [text.replace("clock", "watch") for text in texts[2:]]
    assert accepted(after, vocabulary, texts + wrong) == texts


def test_a_model_of_messages_answers_on_the_final_channel():
    harmony = FORMATS["harmony"]
    vocabulary = TinyVocabulary(harmony.markers, ends=harmony.ends)
    thought = Thought(
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        bridge="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    )
    answer = "<|channel|>final<|message|>true"
    analysis = "<|channel|>analysis<|message|>true?<|end|><|start|>assistant"
    texts = [answer, analysis + answer, "true", analysis + "true"]
    assert accepted(after_thought(BOOLEAN, thought, vocabulary), vocabulary, texts) == texts[:2]


def test_a_model_of_messages_thinks_before_a_call_it_must_make():
    harmony = FORMATS["harmony"]
    vocabulary = TinyVocabulary(harmony.markers, ends=harmony.ends)
    grammar = tool_grammar(tool_format("harmony"), TOOLS, REQUIRED, vocabulary)
    thought = Thought(
        starts=("<|channel|>analysis<|message|>",), ends=("<|end|>",), bridge="<|start|>assistant"
    )
    analysis = "<|channel|>analysis<|message|>A note?<|end|><|start|>assistant"
    after = after_thought(grammar, thought, vocabulary)
    texts = [harmony.none, analysis + harmony.none, analysis]
    assert accepted(after, vocabulary, texts) == texts[:2]


def test_a_model_of_messages_may_think_speak_call_or_answer():
    harmony = FORMATS["harmony"]
    vocabulary = TinyVocabulary(harmony.markers, ends=harmony.ends)
    grammar = tool_grammar(tool_format("harmony"), TOOLS, CallRule(), vocabulary)
    analysis = "<|channel|>analysis<|message|>R<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>Saving it.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Done."
    good = [final, analysis + final, analysis + preamble + harmony.one, preamble + final]
    bad = [analysis, "Done.", harmony.one + final, final + harmony.one]
    assert accepted(grammar, vocabulary, good + bad) == good


TRIGGERED = schema_to_lark('{"const":"<tool_call>"}')


@both_vocabularies
def test_a_trigger_begins_the_grammar(vocabulary):
    grammar = translated('root ::= "<tool_call>" [0-9]+', vocabulary)
    lazy = after_trigger(grammar, ["<tool_call>"], vocabulary)
    good = [
        "",
        "Hello <b> <tool x.",
        "<tool_call>12",
        "<<tool_call>12",
        "<tool <tool_call>12",
        "a<think>b<tool_call>1",
    ]
    bad = ["<tool_call>", "a<tool_call>b", "<tool_call>1 a", "<tool_call>1<tool_call>2"]
    assert accepted(lazy, vocabulary, good + bad) == good


def test_each_of_several_triggers_begins_the_grammar():
    grammar = translated('root ::= "<tool_call>" "1" | "[[" "2" | "[call" "3" | "#" "4"', TOKENS)
    lazy = after_trigger(grammar, ["<tool_call>", "[[", "[call", "#"], TOKENS)
    good = ["a (b) < ca", "a [[2", "a [call3", "a b#4", "a <tool_call>1"]
    bad = ["a [[3", "# 4", "[call", "<tool_call>4", "a [b", "[cab"]
    assert accepted(lazy, TOKENS, [*good, *bad]) == good


@both_vocabularies
@pytest.mark.parametrize("is_open", [True, False])
def test_whatever_is_allowed_is_a_thought_and_then_calls(vocabulary, is_open):
    random = Random(5)
    thought = Thought(**THINK, is_open=is_open, forbidden=("<tool_call>",))
    grammar = tool_grammar(tool_format("hermes_json"), TOOLS, REQUIRED, vocabulary)
    compiled = GrammarCompiler(vocabulary).compile(after_thought(grammar, thought, vocabulary))
    tail = "<|im_start|>assistant\n" + "<think>\n" * is_open
    schemas = {offered.name: offered.parameters for offered in TOOLS}
    family = named_format("hermes_json", "think")
    spec = ReplySpec(format=family, tools=schemas, prompt_tail=tail)
    texts = [walk(compiled, vocabulary, random) for _ in range(20)]
    replies = [play(spec, [text]) for text in texts if text is not None]
    assert len(replies) > 10
    assert all(reply.tool_calls and not reply.content for reply in replies)
    assert any(reply.reasoning for reply in replies)
