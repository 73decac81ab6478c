"""An answer that a schema rules is content to its last byte, through the socket."""

import json

import pytest
from serving import chat, served, stream, user

from scripts.real_templates import TARGET

pytestmark = pytest.mark.mlx

TOOL = {
    "type": "function",
    "function": {
        "name": "w",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"content": {"type": "string", "maxLength": 4}},
            "required": ["content"],
        },
    },
}
# A template, a text that its family would take apart, and whether a tool is offered.
CASES = [
    ("MiniMax-M3", "a <mm:think> b", False),
    ("Qwen3.5-4B", "he <think> said </think> x", False),
    ("GLM-4.6", "a <think> b </think>", False),
    ("GLM-4.6", "<tool_call>w</tool_call>", True),
    (
        "Kimi-K2-Instruct",
        "<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        True,
    ),
    ("google-gemma-4-31B-it", "a <|channel>thought b<channel|> c", False),
    ("openai-gpt-oss-120b", "a <|end|><|start|>assistant<|channel|>analysis<|message|> b", False),
    ("Kimi-K3", "a <|close|>response<|sep|> b", False),
    ("deepseek-ai-DeepSeek-V3.2", 'in <think> and <｜DSML｜invoke name="w">', True),
]
# Tiny models have the tokens of `<think>`, whatever their template.
THOUGHTS = {"openai-gpt-oss-120b": "harmony", "Kimi-K3": "kimi_k3"}


def ruled(value, *, offers_tool, **options):
    schema = {
        "type": "object",
        "properties": {"a": {"const": value}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return chat(
        [user("go")],
        tools=[TOOL] if offers_tool else (),
        Grammar=json.dumps(schema),
        Metadata={"thinking_budget": "3"},
        Tokens=300,
        **options,
    )


async def require_whole(backend, value, *, offers_tool):
    """Require whole answers of several draws; beside a tool, others may be calls."""
    whole = 0
    for seed in range(1, 9):
        request = ruled(value, offers_tool=offers_tool, Seed=seed, Temperature=1.0)
        reply = await stream(backend.stub, request)
        assert value not in reply.reasoning
        if reply.calls and offers_tool:
            assert reply.content == ""
            continue
        assert json.loads(reply.content) == {"a": value}
        assert (await backend.stub.Predict(request)).message.decode() == reply.content
        whole += 1
    assert whole


@pytest.mark.slow
@pytest.mark.parametrize(("template", "value", "offers_tool"), CASES)
@pytest.mark.one_in(3)
async def test_a_ruled_answer_is_whole(tiny_models, template, value, offers_tool):
    path = TARGET / f"{template}.jinja"
    if not path.exists():
        pytest.skip("make templates has not run")
    options = [f"chat_template:{path}"]
    if template in THOUGHTS:
        options.append(f"reasoning_parser:{THOUGHTS[template]}")
    async with served(tiny_models("llama"), Options=options) as backend:
        await require_whole(backend, value, offers_tool=offers_tool)


@pytest.mark.parametrize("offers_tool", [False, True])
async def test_a_ruled_answer_quotes_the_marks_of_its_own_format(shared, tiny_models, offers_tool):
    options = ["tool_parser!:hermes_json", "reasoning_parser:think"]
    call = 'x <tool_call>{"name": "w", "arguments": {}}</tool_call> </think> <think> y'
    async with shared(tiny_models("qwen3"), Options=options) as backend:
        await require_whole(backend, call, offers_tool=offers_tool)
