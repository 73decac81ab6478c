import pytest

from backend.output.format import FormatEvidence, detect, opens_in_reasoning

THINK_TOKENS = {"<think>", "</think>"}
QWEN_TEMPLATE = """<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}"""


def found(vocabulary=(), template="", tools=None, reasoning=None):
    output_format = detect(FormatEvidence(vocabulary, template, tools, reasoning))
    return output_format.tools.name, output_format.reasoning.name


def test_both_halves_are_found_independently():
    assert found() == ("none", "none")
    assert found(THINK_TOKENS) == ("none", "think")
    assert found((), QWEN_TEMPLATE) == ("hermes_json", "none")
    assert found(THINK_TOKENS, QWEN_TEMPLATE) == ("hermes_json", "think")


@pytest.mark.parametrize(
    "wire",
    [
        "<tool_call>\n<function={{ tool_call.name }}>",
        "'<tool_call>\\n<function=' + tool_call.name",
        "<tool_call>{{ tool_call.name }}<arg_key>",
        "<tool_call>{{ tool_call.name }}<tool_sep>",
        "<minimax:tool_call> or <tool_call>{{ tool_call.name }}",
    ],
)
def test_a_family_that_shares_the_marker_is_not_taken_for_hermes(wire):
    assert found(THINK_TOKENS, wire) == ("none", "think")


def test_a_marker_without_a_call_behind_it_is_no_evidence():
    assert found((), "Never write <tool_call>.") == ("none", "none")


@pytest.mark.parametrize("name", ["hermes", "hermes_json", "Hermes", "qwen", "json-tools"])
def test_a_tool_parser_is_named_as_hosts_name_it(name):
    assert found(tools=name) == ("hermes_json", "none")


@pytest.mark.parametrize("name", ["think", "deepseek_r1", "deepseek-r1", "qwen3"])
def test_a_reasoning_parser_is_named_as_hosts_name_it(name):
    assert found(reasoning=name) == ("none", "think")


def test_a_name_wins_over_the_evidence():
    assert found(THINK_TOKENS, QWEN_TEMPLATE, "none", "none") == ("none", "none")


def test_an_unknown_name_is_warned_of_once_and_the_evidence_counts(caplog):  # lessons 79, 90
    for _ in range(3):
        assert found(THINK_TOKENS, QWEN_TEMPLATE, "klingon") == ("hermes_json", "think")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "klingon" in caplog.text


def test_a_format_tells_its_name_and_the_markers_that_must_stay_visible():
    output_format = detect(FormatEvidence(THINK_TOKENS, QWEN_TEMPLATE))
    assert output_format.name == "hermes_json+think"
    assert output_format.markers == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert detect(FormatEvidence((), "")).markers == frozenset()


@pytest.mark.parametrize(
    ("tail", "opens"),
    [
        ("", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nhm, so", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<｜Assistant｜><think>", True),
        ("<｜Assistant｜></think>", False),
        ("<|im_start|>assistant\n<think>\n<|im_end|>\n<|im_start|>assistant\n", False),
        ("User: What is <think>?\nBot:", False),
        ("User: Hi!\nBot: <think>\n", True),
        ("User: Hi!\nBot: <think></think>\n", False),
    ],
)
def test_the_end_of_the_prompt_tells_where_the_reply_begins(tail, opens):  # lesson 105
    think = detect(FormatEvidence(THINK_TOKENS, ""))
    assert opens_in_reasoning(think, tail) is opens
    assert not opens_in_reasoning(detect(FormatEvidence((), "")), tail)
