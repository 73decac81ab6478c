import pytest

from backend.formats.format import FormatEvidence
from backend.formats.objects import TOOL_CODE_FENCE
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.output.detection import detect
from backend.output.reply_format import opens_after_thought, opens_in_reasoning, warn_once

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


TOOL_EVIDENCE = [
    ("deepseek_dsml", "<｜DSML｜invoke", ()),
    ("deepseek_dsml", "", ("｜DSML｜",)),
    ("gigachat35", "", ("｜GCML｜",)),
    ("gigachat35", "<｜GCML｜tool_calls> or <|function_call|>", ()),
    ("rwkv", "{{ '**Tool Call:**' }}", ()),
    ("solar_open2", "", ("<|tool_call:start|>", "<|tool_call:end|>")),
    ("solar_open2", "{{ '<|tool_call:start|>' }}", ()),
    ("harmony", "<tool_call>", ("<|channel|>", "<|call|>", "<|constrain|>")),
    ("kimi_k3", "", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    ("minimax_m3", "]<]minimax[>[<tool_call>", ()),
    ("minimax_m2", "<minimax:tool_call> or <tool_call>{{ tool_call.name }}", ()),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>", ()),
    ("functiongemma", "<start_function_call>", ()),
    ("muse_spark", "<atem:function_calls>", ()),
    ("longcat", "<longcat_tool_call>", ()),
    ("seed_oss", "<seed:tool_call>\n<function=", ()),
    ("hunyuan_v3", "<tool_call>{{ tool_call.name }}<tool_sep><arg_key>", ()),
    ("hunyuan_v3", "'<tool_sep{}>'.format('')", ("<tool_sep>", "<arg_key>")),
    ("hunyuan_v3_opensource", "<tool_call:opensource><tool_sep:opensource>", ()),
    ("hunyuan_v3_opensource", "'<tool_sep{}>'.format(suffix)", ("<tool_sep:opensource>",)),
    ("hunyuan_v4", "<tool_call:a><tool_sep:a><arg_key:a>", ()),
    ("hunyuan_v4", "'<arg_key{}>'.format(tk)", ("<arg_key:6124c78e>", "</arg_key:6124c78e>")),
    ("k2_horizon", "<ifm|tool_call>{{ tool_call.name }}", ()),
    ("k2_horizon", "", ("<ifm|tool_call>",)),
    ("plamo3", "{{ '<|plamo:begin_tool_requests:plamo|>' }}", ()),
    ("dots3", "<dots_function_call><invoke name=", ()),
    ("iquest_coder", "<iquestcoder_tool_call>{{ tool_call.name }}<arg_key>", ()),
    ("iquest_coder", "<arg_key>", ("<iquestcoder_tool_call>",)),
    ("hyperclovax", "<|im_start|>assistant -> tool/function_call\n", ()),
    ("glm4", "<tool_call>{{ tool_call.name }}<arg_key>", ()),
    ("kimi_k2", "<|tool_calls_section_begin|>", ()),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> ```json", ()),
    ("deepseek_v31", "", ("<｜tool▁calls▁begin｜>",)),
    ("cohere", "<|START_ACTION|>", ()),
    ("pythonic", "", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("minicpm3", "<|thought_start|><|tool_call_start|>\n```python\n", ()),
    ("pythonic", "[func_name1(params_name1=params_value1)]", ()),
    ("pythonic", "[func_name1(param1=value1, param2=value2), func_name2(...)]", ()),
    ("pythonic", "<|python_start|>{{ content }}<|python_end|>", ()),
    ("qwen3_coder_xml", "<tool_call>\n<function={{ tool_call.name }}>", ()),
    ("qwen3_coder_xml", "'<tool_call>\\n<function=' + tool_call.name", ()),
    ("minicpm5", '<function name="f"><param name="a">', ()),
    ("nemotron", "<TOOLCALL>[", ()),
    ("nemotron_mini", "{{ '\n<tool> ' + tool|tojson + ' </tool>' }}{{ '<extra_id_1>Tool\n' }}", ()),
    ("mistral", "", ("[TOOL_CALLS]",)),
    ("granite", "<|start_of_role|> <|tool_call|>", ()),
    ("sarashina", "<|assistant|>", ("<|tool_calls|>",)),
    ("sarashina", "<|assistant|><|tool_calls|>", ()),
    ("phi4", "<|tool|> <|tool_call|>", ()),
    ("phi4", "functools[", ()),
    ("phi4", "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", ()),
    ("olmo3", "<function_calls>", ()),
    ("llama3_json", "<|python_tag|>", ()),
    # Llama 4 of Meta; the template of other servers for it asks for Python.
    ("llama3_json", "{{ '<|python_start|>' }}{{ '\"parameters\": ' }}", ()),
    ("functionary", "'>>>'", ()),
    ("json_list", "<tool_calls>", ()),
    ("hunyuan_v1", "print <tool_calls>\n<tool_call>name\n```json\narguments\n```</tool_call>", ()),
    ("apertus", "<|tools_prefix|>", ()),
    ("nemotron", "<TOOLCALL>[func_name1(params_name1=params_value1)]</TOOLCALL>", ()),
    ("xlam", "The output MUST strictly adhere to the following JSON format", ()),
    ("hermes_json", "<tool_call>{{ tool_call.name }}", ()),
    # Falcon-H1 and SmolLM3, whose templates write no calls.
    ("hermes_json", "<tool_call>\n{'arguments': <args-dict>, 'name': <name>}\n</tool_call>", ()),
    ("hermes_json", r'"<tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>"', ()),
    ("glm4_0414", "<|assistant|>{{ meta }} 在调用上述函数时，请使用 Json 格式表示调用的参数。", ()),
    ("none", "plain", ()),
]
REASONING_EVIDENCE = [
    ("harmony", "", ("<|channel|>", "<|call|>", "<|constrain|>")),
    ("xtml_think", "", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    ("muse", "<atem:function_calls>", ()),
    ("mm_think", "<mm:think>", ()),
    ("gemma4_channel", "", ("<|channel>", "<channel|>")),
    ("minicpm3_thought", "<|thought_start|><|thought_end|>", ()),
    ("longcat_think", "<longcat_think>", ()),
    ("seed_think", "<seed:think>", ()),
    ("kimi_think", "◁think▷", ()),
    ("cohere_think", "", ("<|START_THINKING|>",)),
    ("hunyuan_think", "", ("<think:opensource>", "</think:opensource>")),
    ("apertus_inner", "", ("<|inner_prefix|>", "<|inner_suffix|>")),
    ("colon_think", "", ("<|think:start|>", "<|think:end|>")),
    ("mistral_think", "", ("[THINK]", "[/THINK]")),
    ("granite_text", "<|start_of_role|><think></think><response>", ()),
    ("granite_text", "", ("<think>", "</think>", "<response>", "</response>")),
    ("hunyuan_answer", "<think></think><|extra_0|>", ()),
    ("hunyuan_answer", "<｜hy_Assistant｜><think></think>{% if '<answer>' in content %}", ()),
    ("hunyuan_v4_think", "", ("<think:6124c78e>", "</think:6124c78e>")),
    ("hunyuan_v4_think", "<think:ab></think:ab>", ()),
    ("k2_think", "<ifm|think>", ()),
    ("plamo_think", "<|plamo:begin_think:plamo|>", ()),
    ("hyperclovax_think", "<|im_start|>assistant/think", ()),
    ("qwen3_think", "", ("<think>", "</think>", "<|quad_start|>")),
    ("glmv_think", "", ("<think>", "</think>", "<|begin_of_box|>", "<|end_of_box|>")),
    ("think", "", ("<think>", "</think>")),
    ("think", "{{ content.split('</think>')[-1] }}", ()),
    # OLMo 3, Ring and Step.
    ("think", "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}", ()),
    ("none", "plain", ()),
]


@pytest.mark.parametrize(("name", "template", "vocabulary"), TOOL_EVIDENCE)
def test_a_format_is_found_from_its_evidence(name, template, vocabulary):
    assert found(vocabulary, template)[0] == name


@pytest.mark.parametrize(("name", "template", "vocabulary"), REASONING_EVIDENCE)
def test_thoughts_are_found_from_their_evidence(name, template, vocabulary):
    assert found(vocabulary, template)[1] == name


@pytest.mark.parametrize("rows", [TOOL_FORMATS, REASONING_FORMATS], ids=["tools", "reasoning"])
def test_a_name_means_one_format(rows):
    names = [name for row in rows for name in (row.name, *row.aliases)]
    assert sorted(names) == sorted(set(names))


def test_calls_that_nothing_can_read_are_warned_of_once(caplog):
    warn_once.cache_clear()
    for _ in range(3):
        assert not detect(FormatEvidence((), "{{ message.tool_calls }}")).tools.openers
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_marker_without_a_call_after_it_is_no_evidence():
    assert found((), "Never write <tool_call>.") == ("none", "none")


@pytest.mark.parametrize("name", ["hermes", "hermes_json", "Hermes", "qwen", "json-tools"])
def test_a_tool_parser_is_named_as_hosts_name_it(name):
    assert found(tools=name) == ("hermes_json", "none")


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("granite-20b-fc", "granite_20b_fc"),
        ("gpt-oss", "harmony"),
        ("cohere_command4", "cohere"),
        ("deepseekv3", "deepseek_v3"),
        ("deepseekv31", "deepseek_v31"),
        ("deepseekv32", "deepseek_dsml"),
        ("deepseekv4", "deepseek_dsml"),
        ("apertus2509", "apertus"),
        ("glm", "glm4"),
        ("ling3", "glm4"),
        ("spark25", "glm4"),
        ("trinity", "hermes_json"),
        ("interns1", "internlm2"),
        ("intern_s1", "internlm2"),
        ("hunyuan", "hunyuan_v3"),
        ("granite_pythonic", "granite"),
        ("hyperclovax_seed_think", "glm4"),
        ("hyperclovax_seed_think_14b", "hyperclovax"),
    ],
)
def test_names_of_other_servers_are_known(name, format_name):
    assert found(tools=name) == (format_name, "none")


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("cohere_command4", "cohere_think"),
        ("apertus2509", "apertus_inner"),
        ("glm47", "think"),
        ("holo2", "think"),
        ("nemotron_3", "think"),
        ("minimax", "think"),
        ("gigachat35", "think"),
        ("hyperclovax_seed_think", "think"),
        ("kimi", "kimi_think"),
        ("qwen3-thinking", "qwen3_think"),
        ("think", "think"),
        ("deepseek_r1", "think"),
        ("deepseek-r1", "think"),
        ("qwen3", "qwen3_think"),
    ],
)
def test_a_reasoning_parser_is_named_as_hosts_name_it(name, format_name):
    assert found(reasoning=name) == ("none", format_name)


def test_a_name_wins_over_the_evidence():
    assert found(THINK_TOKENS, QWEN_TEMPLATE, "none", "none") == ("none", "none")
    assert found(THINK_TOKENS, QWEN_TEMPLATE, "mistral!") == ("mistral", "think")


@pytest.mark.parametrize(
    ("hint", "vocabulary", "template", "name"),
    [
        ("deepseek_v3", ("｜DSML｜",), "<｜DSML｜function_calls>", "deepseek_dsml"),
        ("minimax_m2", (), "]<]minimax[>[", "minimax_m3"),
        ("mistral", (), QWEN_TEMPLATE, "hermes_json"),
    ],
)
def test_a_hint_that_contradicts_the_evidence_loses_with_one_warning(
    caplog, hint, vocabulary, template, name
):
    warn_once.cache_clear()
    for _ in range(3):
        assert found(vocabulary, template, hint)[0] == name
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"tool_parser {hint!r} contradicts the model's own evidence of {name}, which wins; "
        f"tool_parser!:{hint} forces it"
    )


def test_a_hint_that_the_evidence_bears_out_is_no_news(caplog):
    assert found(THINK_TOKENS, QWEN_TEMPLATE, "hermes") == ("hermes_json", "think")
    assert not caplog.records


def test_an_unknown_name_is_warned_of_once_and_the_evidence_counts(caplog):
    for _ in range(3):
        assert found(THINK_TOKENS, QWEN_TEMPLATE, "klingon") == ("hermes_json", "think")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "klingon" in caplog.text


def test_a_format_tells_its_name_and_the_markers_that_must_stay_visible():
    output_format = detect(FormatEvidence(THINK_TOKENS, QWEN_TEMPLATE))
    assert output_format.name == "hermes_json+think"
    marks = {"<think>", "</think>", "<tool_call>", "</tool_call>", TOOL_CODE_FENCE}
    assert output_format.markers == marks
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
        ("]~b]ai\n<think>\n", True),
        ("<|turn>model\n", False),
        ("<｜Assistant｜></think>", False),
        ("<｜hy_Assistant:opensource｜><think>", True),
        ("<|im_start|>assistant\n<think>\n<|im_end|>\n<|im_start|>assistant\n", False),
        ("User: What is <think>?\nBot:", False),
        ("User: Hi!\nBot: <think>\n", True),
        ("User: Hi!\nBot: <think></think>\n", False),
    ],
)
def test_the_end_of_the_prompt_tells_where_the_reply_begins(tail, opens):
    think = detect(FormatEvidence(THINK_TOKENS, ""))
    assert opens_in_reasoning(think, tail) is opens
    assert not opens_in_reasoning(detect(FormatEvidence((), "")), tail)


@pytest.mark.parametrize(
    ("tail", "is_after"),
    [
        ("", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True),
        ("<｜Assistant｜></think>", True),
        ("<think></think>Hi!<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_end_of_the_prompt_tells_whether_the_thought_is_over(tail, is_after):
    think = detect(FormatEvidence(THINK_TOKENS, ""))
    assert opens_after_thought(think, tail) is is_after
    assert not opens_after_thought(detect(FormatEvidence((), "")), tail)


def test_a_suffix_of_one_checkpoint_is_in_all_its_markers():
    tokens = ("<arg_key:ab12>", "<think:ab12>", "<tool_sep:ab12>")
    own = detect(FormatEvidence(tokens, ""))
    assert own.name == "hunyuan_v4+hunyuan_v4_think"
    assert own.tools.opener == "<tool_calls:ab12>"
    assert own.reasoning.end == "</think:ab12>"
    assert "<tool_sep:ab12>" in own.markers
    without_end = detect(FormatEvidence(("<arg_key:ab12>",), ""))
    assert "<tool_sep:ab12>" not in without_end.markers
    assert detect(FormatEvidence(tokens, "")).tools is own.tools
