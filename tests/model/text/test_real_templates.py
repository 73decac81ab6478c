"""Chat templates of real models: their formats are found, and conversations keep all their parts.

They are there after `make templates`; without them these tests are skipped. What
is expected of each was read in the template itself.
"""

import functools
import json
from itertools import cycle, takewhile

import pytest
from grammar_driver import tool_grammar
from hypothesis import given, settings
from jinja_here import jinja_here
from message_shapes import CONVERSATIONS, SHAPES, said
from msgspec.structs import replace
from odd_tools import NAME, ODD_TOOLS, PURPOSE, WELL_FORMED, with_property
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from tool_conversations import ANSWERED, QUESTION, TWO_CALLS, WEATHER
from tool_replies import FORMATS as REPLIES
from tool_walks import TinyVocabulary, tokens_of
from transformers import PreTrainedTokenizerFast

from backend.core.prompt import EXAMPLE_TOOL, MediaKind, Message, Placement, Tool, ToolCall
from backend.core.step import ToolCallDelta
from backend.formats.dialects import text_of
from backend.formats.format import FormatEvidence
from backend.model.text.conversation import CallStyle, to_turns
from backend.model.text.renderer import render_with_tools
from backend.model.text.template import (
    ChatTemplate,
    find_snippets,
    up_to_open_end,
    with_open_end,
)
from backend.model.text.tool_forms import ToolForms, written_call
from backend.output.detection import detect, spelling_of
from backend.output.reply_format import opens_in_reasoning
from backend.output.router import Router
from backend.sampling.grammar.compiler import GrammarCompiler
from backend.sampling.grammar.tool_parameters import CallRule
from scripts.real_templates import TARGET

NAMES = sorted(path.stem for path in TARGET.glob("*.jinja"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="make templates has not run"),
]

FORMATS = {
    "apertus": ("Apertus-8B-Instruct",),
    "cohere": (
        "Cohere2MoE",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    ),
    "deepseek_dsml": (
        "deepseek-ai-DeepSeek-V3.2",
        "deepseek-ai-DeepSeek-V4-Flash-0731",
        "deepseek-ai-DeepSeek-V4",
    ),
    "deepseek_v3": (
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "llama-cpp-deepseek-r1",
    ),
    "deepseek_v31": ("deepseek-ai-DeepSeek-V3.1",),
    "functionary": ("meetkai-functionary-medium-v3.2",),
    "command_r_plus": ("CohereForAI-c4ai-command-r-plus-tool_use",),
    "gigachat3": (
        "GigaChat3-10B-A1.8B",
        "GigaChat3.1-10B-A1.8B",
    ),
    "solar_open": ("upstage-Solar-Open-100B",),
    "gemma4": (
        "google-gemma-4-31B-it-interleaved",
        "google-gemma-4-31B-it",
    ),
    "glm4": (
        "GLM-4.6",
        "GLM-4.7-Flash",
        "Spark2.5",
        "inclusionai-ling-3.0-flash",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
    ),
    "granite": ("ibm-granite-granite-3.3-2B-Instruct",),
    "harmony": ("openai-gpt-oss-120b",),
    "hermes_json": (
        "Bielik-11B-v3.0-Instruct",
        "MiMo-VL",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Reka-Edge",
        "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
    ),
    "hunyuan_v3_opensource": ("tencent-Hy3",),
    "json_list": (
        "Apriel-1.6-15b-Thinker-fixed",
        "MiniMax-M1",
        "unsloth-Apriel-1.5",
    ),
    "kimi_k2": (
        "Kimi-K2-Instruct",
        "Kimi-K2-Thinking",
        "moonshotai-Kimi-K2",
    ),
    "kimi_k3": ("Kimi-K3",),
    "llama3_json": (
        "meetkai-functionary-medium-v3.1",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
    ),
    "minicpm5": ("openbmb-MiniCPM5-1B",),
    "minimax_m2": ("MiniMax-M2",),
    "minimax_m3": ("MiniMax-M3",),
    "mistral": (
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "unsloth-mistral-Devstral-Small-2507",
    ),
    "muse_spark": ("muse-glimmer",),
    "nemotron": ("NVIDIA-Nemotron-Nano-v2",),
    "phi4": ("fireworks-ai-llama-3-firefunction-v2",),
    "pythonic": (
        "LFM2-8B-A1B",
        "LFM2.5-8B-A1B",
    ),
    "qwen3_coder_xml": (
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "StepFun3.5-Flash",
    ),
    "seed_oss": ("ByteDance-Seed-OSS",),
}
FOUND = {name: found for found, names in FORMATS.items() for name in names}
# It drops text next to calls once they are answered.
LOSING = {"openai-gpt-oss-120b"}


@functools.cache
def template(name):
    text = (TARGET / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer(models.BPE()),
        bos_token="<s>",  # noqa: S106 (no password)
        eos_token="</s>",  # noqa: S106 (no password)
        chat_template=text,
    )
    return jinja_here(tokenizer)


def template_with_tools(name):
    """Return a template that shows tools; of others there is nothing to test."""
    found = template(name)
    if not found.supports_tools:
        pytest.skip("it shows no tools")
    return found


@pytest.mark.parametrize("name", FOUND)
def test_the_format_is_found_without_a_vocabulary(name):
    found = template(name)
    evidence = FormatEvidence((), found.text, written_call=found.written_call)
    assert detect(evidence).tools.name == FOUND[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LOSING])
@pytest.mark.parametrize("messages", [TWO_CALLS, ANSWERED], ids=["pending", "answered"])
def test_a_conversation_with_calls_keeps_all_its_parts(name, messages):
    found = template(name)
    text = found.render(messages, [WEATHER] if found.supports_tools else [], {})
    said = [message.content for message in messages if message.content]
    assert [part for part in said if text.count(part) != 1] == []
    # Each city is in a call and in a result.
    assert min(text.count("Oslo"), text.count("Rome")) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_a_question_is_rendered(name):
    assert QUESTION.content in template(name).render([QUESTION], [], {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_odd_tools_are_shown(name):
    found = template_with_tools(name)
    for odd in ODD_TOOLS.values():
        text = found.render([QUESTION], [Tool(name=NAME, schema=odd)], {})
        parts = [part for part in (NAME, PURPOSE, "odd_one") if part in json.dumps(odd)]
        assert [part for part in parts if part not in text] == [], odd


ADDRESS = {"type": "object", "properties": {"zipcode": {"type": "string"}}}
REFERENCE = {"$ref": "#/$defs/Address"}
# As Pydantic and Zod write optional and nested arguments.
PARTS = (
    REFERENCE,
    ADDRESS,
    {"anyOf": [ADDRESS, {"type": "null"}]},
    {"anyOf": [{"type": "string", "enum": ["zipcode"]}, {"type": "null"}]},
    {"type": ["string", "null"], "enum": ["zipcode", None]},
    {"type": "array", "items": REFERENCE},
    {"oneOf": [{"const": "zipcode"}, {"const": "b"}]},
    {"allOf": [REFERENCE]},
    {"const": "zipcode"},
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_names_and_values_inside_a_property_are_shown(name):
    found = template_with_tools(name)
    for part in PARTS:
        odd = with_property(part)
        odd["function"]["parameters"]["$defs"] = {"Address": ADDRESS}
        assert "zipcode" in found.render([QUESTION], [Tool(name=NAME, schema=odd)], {}), part


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_the_form_of_a_tool_depends_on_no_other(name):
    found = template_with_tools(name)
    tools = list(ODD_TOOLS.values())
    forms = ToolForms(found.renderer).fitted(tools)
    assert ToolForms(found.renderer).fitted(tools[::-1]) == forms[::-1]
    assert found.tool_forms.fitted(tools) == forms


@pytest.mark.parametrize("name", NAMES)
def test_an_ordinary_tool_is_rendered_as_it_is(name):
    found = template_with_tools(name)
    tools = [Tool(name=NAME, schema=WELL_FORMED)]
    schemas = [tool.schema for tool in tools]
    turns = to_turns([QUESTION], CallStyle())
    own = render_with_tools(found.renderer, turns, schemas, {})
    assert found.render([QUESTION], tools, {}) == own


# Templates may drop an assistant's text before a call.
KEPT = ("system", "developer", "user", "tool", "function")


def shown_tools(found):
    return ([], [WEATHER]) if found.supports_tools else ([],)


@pytest.mark.parametrize("name", NAMES)
def test_no_shape_of_a_conversation_is_refused_and_no_text_of_it_lost(name):
    found = template(name)
    for shape, messages in SHAPES.items():
        words = [message.content.strip() for message in messages if message.content]
        for tools in shown_tools(found):
            text = found.render(messages, tools, {})
            assert [word for word in words if word not in text] == [], (shape, tools)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(messages=CONVERSATIONS)
def test_no_conversation_in_any_order_is_refused_or_loses_a_text(name, messages):
    found = template(name)
    for tools in shown_tools(found):
        text = found.render(messages, tools, {})
        words = [message.content for message in messages if message.role in KEPT]
        assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_shape_of_a_conversation_loses_an_image(name):
    found = template(name)
    snippets = find_snippets(found, {})
    for shape, messages in SHAPES.items() if snippets.takes_parts else ():
        shown = [
            replace(m, media=(Placement(2, MediaKind.IMAGE),)) if m.role == "user" else m
            for m in messages
        ]
        text = found.render(shown, [], {})
        images = text.count(snippets.texts[MediaKind.IMAGE])
        assert images == sum(message.role == "user" for message in messages), shape
        parts = [m.content for m in shown if not m.media]
        parts += [part for m in shown if m.media for part in (m.content[:2], m.content[2:])]
        assert [part for part in parts if part.strip() not in text] == [], shape


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_can_end_with_the_last_message_letter_by_letter(name):
    found, begun = template(name), '```json\n{"a": '
    for shape, messages in SHAPES.items():
        open_ended = with_open_end([*messages, said("assistant", begun)])
        assert up_to_open_end(found.render(open_ended, [], {})).endswith(begun), shape


@pytest.mark.parametrize("name", NAMES)
def test_a_template_without_tools_gets_them_as_text(name):
    bare = template(name)
    if bare.supports_tools:
        pytest.skip("it shows tools itself")
    found = ChatTemplate(bare.renderer, bare.text, writes_tools=True)
    evidence = FormatEvidence((), found.text, written_call=found.written_call)
    assert detect(evidence).tools.name == "hermes_json"
    for shape, messages in SHAPES.items():
        text = found.render(messages, [WEATHER], {})
        words = [message.content.strip() for message in messages if message.content]
        calls = [call for message in messages for call in message.tool_calls]
        parts = [json.dumps(WEATHER.schema), *words, *map(written_call, calls)]
        assert [part for part in parts if part not in text] == [], shape


def asked(messages):
    """Where in a conversation a reply was asked for: before each assistant turn, and at the end."""
    ends = [n for n, message in enumerate(messages) if n and message.role == "assistant"]
    return [*ends, len(messages)]


def grows(found, messages, tools, *, since=0):
    """Whether each prompt from some reply on begins with the one before it, but for its end."""
    places = asked(messages)[since:]
    prompts = [found.render(messages[:end], tools, {}) for end in places]
    lasts = [messages[end - 1].content for end in places]
    ends = [text.rfind(last) + len(last) for text, last in zip(prompts, lasts, strict=True)]
    return all(
        later.startswith(text[:end])
        for text, end, later in zip(prompts, ends, prompts[1:], strict=False)
    )


def plain(messages):
    """The conversation without its later system messages, and with user messages instead."""
    later = [n > 0 and m.role in ("system", "developer") for n, m in enumerate(messages)]
    pairs = list(zip(messages, later, strict=True))
    yield [message for message, is_later in pairs if not is_later]
    yield [said("user", m.content) if is_later else m for m, is_later in pairs]


LATER = [
    shape
    for shape, messages in SHAPES.items()
    if any(message.content in ("midx", "developerx") for message in messages[1:])
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_a_later_system_message_leaves_the_prompt_before_it_as_it_was(name):
    found = template(name)
    for shape in LATER:
        messages = SHAPES[shape]
        for tools in shown_tools(found):
            # Some templates themselves change the text before a later question.
            if all(grows(found, others, tools) for others in plain(messages)):
                assert grows(found, messages, tools), (shape, tools)


def steps(word):
    """Two calls with remarks and thoughts, and their results."""
    for n in range(2):
        call = ToolCall(call_id=f"call{word}0{n}", name=WEATHER.name, arguments='{"city": "Oslo"}')
        remark = Message(role="assistant", content=f"Step {word} {n}.", tool_calls=(call,))
        yield replace(remark, reasoning_content=f"Thought {word} {n}.")
        yield Message(role="tool", content=f"Result {word} {n}.", tool_call_id=call.call_id)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_an_agent_leaves_the_prompt_before_it_as_it_was(name):
    found = template(name)
    earlier = [said("system", "Rules."), said("user", "Question."), *steps("one")]
    now = [said("assistant", "Answer."), said("user", "Another."), *steps("two")]
    assert grows(found, [*earlier, *now], [WEATHER] if found.supports_tools else [], since=3)


def test_calls_of_gpt_oss_stay_calls_beside_a_remark_and_a_thought():
    found = template("openai-gpt-oss-120b")
    text = found.render([said("user", "Question."), *steps("one")], [WEATHER], {})
    assert text.count("to=functions.weather<|channel|>commentary json") == 2


# Templates in which thoughts can be switched off: by a switch, or by the effort alone.
SWITCHED = {
    *("Apertus-8B-Instruct", "Bielik-11B-v3.0-Instruct", "ByteDance-Seed-OSS", "Cohere2MoE"),
    *("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GLM-4.6", "GLM-4.7-Flash", "Kimi-K3"),
    *("HuggingFaceTB-SmolLM3-3B", "MiniMax-M3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    *("Qwen-QwQ-32B", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Reka-Edge", "Spark2.5"),
    *("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1"),
    *("deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4", "inclusionai-ling-3.0-flash"),
    *("deepseek-ai-DeepSeek-V4-Flash-0731", "google-gemma-4-31B-it", "llama-cpp-rwkv-world"),
    *("google-gemma-4-31B-it-interleaved", "ibm-granite-granite-3.3-2B-Instruct"),
    *("openbmb-MiniCPM5-1B", "poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1"),
    *("poolside-Laguna-XS.2", "openai-gpt-oss-120b", "muse-glimmer", "tencent-Hy3"),
    "upstage-Solar-Open-100B",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name in SWITCHED])
def test_no_effort_means_no_thinking(name):
    found = template(name)
    none = {"enable_thinking": False, "reasoning_effort": "none"}
    high = {"enable_thinking": True, "reasoning_effort": "high"}
    text = found.render([QUESTION], [], none)
    assert text != found.render([QUESTION], [], high)
    evidence = FormatEvidence((), found.text, written_call=found.written_call)
    assert not opens_in_reasoning(detect(evidence), text)


@pytest.mark.parametrize("name", NAMES)
def test_no_effort_of_the_api_is_refused(name):
    found = template(name)
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        thinks = {"enable_thinking": effort != "none"}
        assert found.render([QUESTION], [], {**thinks, "reasoning_effort": effort})


# Indented JSON; a block without an end; a header that the prompt begins (twice); ids of its own.
HELD_OTHERWISE = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "muse-glimmer",
    "openai-gpt-oss-120b",
    "upstage-Solar-Open-100B",
}


@pytest.mark.parametrize("name", [name for name in FOUND if name not in HELD_OTHERWISE])
def test_calls_are_held_to_the_layout_in_which_it_writes_them(name):
    """A model that is held to another layout writes calls that it has not learnt."""
    found = template(name)
    written = found.written_call
    if not written:
        pytest.skip("it writes no calls")
    form = detect(FormatEvidence((), found.text, written_call=written)).tools
    markers = {
        replies.markers
        for kind, replies in REPLIES.items()
        if (replies.parser or kind) == form.name
    }
    assert any(
        begins_with_a_call(written[written.index(opener) :], form, TinyVocabulary(of_model))
        for of_model in {(), *markers}
        for opener in (text_of(frame.first_call[:1]) for frame in form.frames)
        if opener in written
    )


def begins_with_a_call(text, form, vocabulary):
    """Tell whether a text begins with a whole call, as a grammar demands it."""
    rule = CallRule(least=1, most=1, has_text=False)
    grammar = tool_grammar(form, [EXAMPLE_TOOL], rule, vocabulary)
    matcher = GrammarCompiler(vocabulary).compile(grammar).matcher()
    taken = takewhile(matcher.consume, tokens_of(text, vocabulary))
    return any(matcher.is_accepting for _ in taken)


# It writes no calls, and its format has ids, or it leaves out quotes and escapes.
UNWRITTEN = {"Kimi-K2-Instruct", "Kimi-K2-Thinking", "NVIDIA-Nemotron-Nano-v2"}
OF_A_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
ODD_NAMES = ("fs/read_file", "server:tool", "tool.name", "工具", "1-a")
ODD_TEXTS = ("  a\n", "5", "null", '{"a": 1}', "</x> <b>", "it's", '"quoted"', "ü→😀", "a, b=c")


@pytest.mark.parametrize("name", [name for name in FOUND if name not in UNWRITTEN])
def test_a_call_that_it_writes_is_read_back_whatever_its_name_and_text(name):
    found = template_with_tools(name)
    evidence = FormatEvidence((), found.text, written_call=found.written_call)
    form = detect(evidence)
    if spelling := spelling_of(form.tools, evidence.has):
        found.spell_calls(spelling)
    tools = [Tool(name=name, schema=named(name)) for name in ODD_NAMES]
    asked = found.render([QUESTION], tools, {})
    for tool_name, text in zip(cycle(ODD_NAMES), ODD_TEXTS, strict=False):
        arguments = json.dumps({"city": text}, ensure_ascii=False)
        call = ToolCall(call_id="call00001", name=tool_name, arguments=arguments)
        messages = [QUESTION, Message(role="assistant", tool_calls=(call,))]
        written = found.render(messages, tools, {})
        end = asked if written.startswith(asked) else written.partition(QUESTION.content)[0]
        router = Router(form, tools=dict.fromkeys(ODD_NAMES, OF_A_CITY))
        deltas = [*router.feed(written.removeprefix(end)), *router.finish(truncated=False)]
        calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
        assert "".join(delta.name for delta in calls) == tool_name
        assert json.loads("".join(delta.arguments for delta in calls)) == {"city": text}


def named(name):
    function = {"name": name, "description": PURPOSE, "parameters": OF_A_CITY}
    return {"type": "function", "function": function}
