"""The rules for the host's habits, each with the request or reply that the host sends or gets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backend.config import ModelOptions, TuningOptions
from backend.core.model import ModelCard, ModelKind
from backend.core.prompt import Message, ToolCall
from backend.core.step import Finish, FinishReason
from backend.pb import backend_pb2 as pb
from backend.rpc.host_rules import (
    HostsReply,
    restore_tool_results,
    unmet_wishes,
    without_billing,
)
from backend.rpc.parsing.generation_fields import generation_call

CALLS = tuple(
    ToolCall(call_id=call_id, name=name, arguments="{}")
    for call_id, name in [("toolu_1", "get_weather"), ("toolu_2", "clock")]
)
QUESTION = Message(role="user", content="How is Oslo?")
TURN = Message(role="assistant", tool_calls=CALLS)


def user(text):
    return Message(role="user", content=text)


def result(call_id, name, text):
    return Message(role="tool", tool_call_id=call_id, name=name, content=text)


def restored(*messages):
    return restore_tool_results((QUESTION, TURN, *messages))[2:]


def test_a_tool_result_in_user_text_is_a_tool_message_again():
    assert restored(user("[Tool Result for toolu_1]: 3 C\nand rain")) == (
        result("toolu_1", "get_weather", "3 C\nand rain"),
    )


def test_results_of_one_turn_are_restored_from_one_message_or_from_several():
    expected = result("toolu_1", "get_weather", "3 C"), result("toolu_2", "clock", "noon")
    texts = "[Tool Result for toolu_1]: 3 C", "[Tool Result for toolu_2]: noon"
    assert restored(user("\n".join(texts))) == expected
    assert restored(*map(user, texts)) == expected


def test_text_of_the_user_before_a_result_stays_the_users():
    assert restored(user("Look:\n[Tool Result for toolu_2]: noon")) == (
        user("Look:"),
        result("toolu_2", "clock", "noon"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "[Tool Result for toolu_9]: an id that was not called",
        "see [Tool Result for toolu_1]: inside of a line",
        "[Tool Result for toolu_1] without a colon",
    ],
)
def test_other_text_stays_the_users(text):
    assert restored(user(text)) == (user(text),)


def test_an_id_counts_for_the_turn_after_its_call_only():
    later = user("[Tool Result for toolu_1]: 3 C")
    answer = Message(role="assistant", content="3 C")
    assert restored(answer, later) == (answer, later)


@pytest.mark.parametrize("rain", ['{"sky": ["rain"]}', '["rain", 3]'])
def test_a_text_that_is_glued_to_a_result_in_json_is_the_users_again(rain):
    assert restored(user(f"[Tool Result for toolu_1]: {rain}Go on.")) == (
        result("toolu_1", "get_weather", rain),
        user("Go on."),
    )


@pytest.mark.parametrize(
    "text",
    [
        "rainGo on.",
        '{"sky": "rain"}',
        '{"sky": "rain"}\n{"sky": "sun"}',
        '{"sky": "rain"} tomorrow',
        "[1]: the first source",
        '{"sky": rain}Go on.',
        "[" * 100_000,
    ],
    ids=["words", "json", "lines", "spaced", "footnote", "broken", "deep"],
)
def test_a_result_without_a_visible_seam_stays_whole(text):
    expected = result("toolu_1", "get_weather", text)
    assert restored(user(f"[Tool Result for toolu_1]: {text}")) == (expected,)


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.c7a; cc_entrypoint=sdk-cli;"


def system(text):
    return Message(role="system", content=text)


@pytest.mark.parametrize("line", [BILLING, f"{BILLING} cch=eb6c6; cc_is_subagent=true;"])
@pytest.mark.parametrize("seam", ["", "\n", "\n\n"])
def test_a_system_prompt_begins_after_the_line_that_bills_it(line, seam):
    rest = "You are Claude Code: a=b; c."
    assert without_billing((system(line + seam + rest), QUESTION)) == (system(rest), QUESTION)
    assert without_billing((system(line + seam), QUESTION)) == (QUESTION,)


@pytest.mark.parametrize(
    "messages",
    [
        (system(f"Drop {BILLING}"),),
        (system("x-anthropic-billing-header: what is it?"),),
        (user(BILLING),),
        (QUESTION, system(BILLING)),
        (),
    ],
)
def test_other_messages_keep_what_looks_like_the_line(messages):
    assert without_billing(messages) == messages


def test_a_whole_schema_in_the_metadata_goes_before_the_grammar_that_the_host_makes():
    schema = '{"type": "array", "items": {"type": "string", "pattern": "^a"}, "maxItems": 2}'
    request = pb.PredictOptions(Prompt="hi", Grammar='root ::= "[" [a-z]* "]"')
    request.Metadata["json_schema"] = schema
    assert generation_call(request, ModelOptions(model="m")).grammar == schema
    request.Metadata["json_schema"] = " "
    assert generation_call(request, ModelOptions(model="m")).grammar == request.Grammar


def function_grammar(name):
    """The grammar that the host writes for one function without parameters."""
    return (
        f'root-0-name ::= "\\"{name}\\""\n'
        'root-0 ::= "{" "\\"arguments\\"" ":" "{}" "," "\\"name\\"" ":" root-0-name "}"\n'
        "root ::= root-0"
    )


def strict_call(grammar, *, strict=True, name="clock"):
    tool = {"type": "function", "function": {"name": name, "strict": strict, "parameters": {}}}
    return generation_call(
        pb.PredictOptions(
            UseTokenizerTemplate=True,
            Messages=[pb.Message(role="user", content="hi")],
            Tools=json.dumps([tool]),
            Grammar=grammar,
        ),
        ModelOptions(model="m"),
    )


def test_a_label_of_a_request_that_the_host_copies_does_not_replace_a_part_of_it():
    copied = {"conversation": "7", "tools": "x", "language": "en"}
    metadata = {**copied, "chat_template_kwargs": json.dumps({**copied, "self": 1})}
    request = pb.PredictOptions(Prompt="hi", Metadata=metadata)
    options = generation_call(request, ModelOptions(model="m")).template_options
    assert options == {"language": "en", "self": 1}


def test_the_hosts_grammar_for_a_strict_tool_gives_way_to_the_models_own_format():
    call = strict_call(function_grammar("clock"))
    assert call.grammar == ""
    assert call.constrains_calls


@pytest.mark.parametrize("recorded", ["tools_default", "tools_noaction", "tools_llama31"])
def test_every_form_of_the_hosts_function_grammars_is_known(recorded):
    grammar = Path(__file__).parent.parent / "golden" / "gbnf" / f"{recorded}.gbnf"
    assert strict_call(grammar.read_text(encoding="utf-8"), name="search").grammar == ""


def test_a_grammar_beside_tools_is_obeyed_when_no_tool_is_strict():
    grammar = function_grammar("clock")
    assert strict_call(grammar, strict=False).grammar == grammar


def test_a_grammar_that_is_not_about_the_tools_is_obeyed():
    grammar = 'root ::= "{" "\\"clock\\"" ":" ["0-9]+ "}"'
    assert strict_call(grammar).grammar == grammar


def reply(*deltas, tokens=5):
    return pb.Reply(chat_deltas=deltas, tokens=tokens)


THOUGHT = pb.ChatDelta(reasoning_content="hm")


def settled(*replies, max_tokens=0, reason=FinishReason.STOP):
    rule = HostsReply(pb.PredictOptions(Tokens=max_tokens, ModelIdentity="m"))
    *others, last = replies
    return [rule.settle(each, None) for each in others] + [rule.settle(last, Finish(reason))]


def test_a_thought_without_an_answer_ends_with_a_newline_that_stops_the_hosts_retries():
    last = settled(reply(THOUGHT), reply())[-1]
    assert last.message == b"\n"
    assert [delta.content for delta in last.chat_deltas] == ["\n"]


@pytest.mark.parametrize(
    "answer",
    [pb.ChatDelta(content="Hi"), pb.ChatDelta(tool_calls=[pb.ToolCallDelta(name="clock")])],
)
def test_a_reply_with_an_answer_is_left_as_it_is(answer):
    assert not settled(reply(THOUGHT), reply(answer), reply())[-1].message


def test_a_reply_that_used_up_its_limit_is_left_as_it_is_since_the_host_takes_it():
    assert not settled(reply(THOUGHT), reply(tokens=8), max_tokens=8)[-1].message
    assert settled(reply(THOUGHT), reply(tokens=7), max_tokens=8)[-1].message


def test_an_empty_reply_is_left_empty_unless_the_context_cut_it_off():
    assert not settled(reply())[-1].message
    assert settled(reply(), reason=FinishReason.LENGTH)[-1].message == b"\n"


def card(context_length):
    return ModelCard(
        name="tiny",
        path="",
        model_type="llama",
        context_length=context_length,
        vocab_size=256,
        eos_token_ids=frozenset({0}),
        weights_bytes=5,
        supports_tools=True,
        supports_thinking=False,
    )


UNCAPPED = "does not limit the context: {}; MaxModelLen (max_model_len) limits it"


@pytest.mark.parametrize(
    ("size", "context_length", "held"),
    [
        (0, 40960, None),
        (4096, 4096, None),
        (4096, 2048, None),
        (4096, 40960, "that is 40960 tokens"),
        (4096, None, "the model has none"),
    ],
)
def test_a_context_size_below_the_models_own_is_told_not_to_count(size, context_length, held):
    options = ModelOptions(model="m")
    wishes = list(unmet_wishes(pb.ModelOptions(ContextSize=size), card(context_length), options))
    assert wishes == ([f"ContextSize {size} {UNCAPPED.format(held)}"] if held else [])


@pytest.mark.parametrize(
    ("options", "facts", "reason"),
    [
        ({"speculation": "off"}, {}, "speculation is off"),
        ({}, {"kind": ModelKind.ENCODER}, "a model of the kind encoder generates nothing"),
        (
            {"tensor_parallel_size": 2},
            {},
            "nothing is drafted for a model on several processes",
        ),
        ({}, {}, "nothing is drafted for this model, and the log of its load says why"),
        ({}, {"draft_model": "/models/small"}, None),
    ],
)
def test_why_a_draft_model_is_not_loaded_is_told(options, facts, reason):
    tuning = TuningOptions.of(draft_model="small", **options)
    loaded = replace(card(4096), **facts)
    wishes = list(unmet_wishes(pb.ModelOptions(), loaded, ModelOptions(model="m", tuning=tuning)))
    assert wishes == ([f"draft_model 'small' is not loaded: {reason}"] if reason else [])


def test_that_no_head_drafts_is_told_to_whom_asked_for_one():
    options = ModelOptions(model="m", tuning=TuningOptions.of(speculation="mtp"))
    (wish,) = unmet_wishes(pb.ModelOptions(), card(4096), options)
    assert wish.startswith("an MTP head is not loaded: nothing is drafted for this model")
    assert not list(unmet_wishes(pb.ModelOptions(), replace(card(4096), draft_model="m"), options))


def piece(index=0, **fields):
    return reply(pb.ChatDelta(tool_calls=[pb.ToolCallDelta(index=index, **fields)]))


def called(*replies, reason):
    deltas = [delta for each in settled(*replies, reason=reason) for delta in each.chat_deltas]
    return [(call.id, call.name, call.arguments) for each in deltas for call in each.tool_calls]


def begun():
    return piece(id="a", name="f", arguments="{"), piece(arguments="}")


def test_a_call_is_sent_whole_once_something_follows_it():
    pieces = (*begun(), piece(1, id="b", name="g"), piece(1, id="c"), reply(THOUGHT), reply())
    sent = settled(*pieces, reason=FinishReason.TOOL_CALLS)
    assert [len(each.chat_deltas) for each in sent] == [0, 0, 1, 0, 2, 0]
    calls = [call for each in sent for delta in each.chat_deltas for call in delta.tool_calls]
    assert calls == [
        pb.ToolCallDelta(index=0, id="a", name="f", arguments="{}"),
        pb.ToolCallDelta(index=1, id="c", name="g", arguments="{}"),
    ]


@pytest.mark.parametrize("arguments", ["", '{"'])
def test_only_a_limit_leaves_out_the_call_that_it_cut_off(arguments):
    for reason, count in ((FinishReason.LENGTH, 1), (FinishReason.STOP, 2)):
        last = piece(1, id="b", name="g", arguments=arguments)
        assert len(called(*begun(), last, reply(), reason=reason)) == count


def test_a_limit_after_the_last_call_leaves_it():
    assert called(*begun(), reply(), reason=FinishReason.LENGTH) == [("a", "f", "{}")]
