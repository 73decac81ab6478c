"""SmolLM2-135M-Instruct through the socket: equal to llama.cpp, and to itself in every way."""

import asyncio
import json
import os
import signal
from pathlib import Path

import jsonschema
import pytest
from real_answers import (
    FINDINGS,
    asked,
    listed,
    require_ids,
    require_ids_of_the_file,
    require_near,
    require_reply,
)
from serving import Reply, chat, require_same, stream, until, until_accepted, user

from backend.pb import backend_pb2 as pb
from scripts.real_models.prompts import PROMPTS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.mlx

# The largest distance of a log-probability from llama.cpp's in float32.
BOUND = 5e-4
SHORT = ("capital", "digits", "code", "yaml")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
HERMES = """{%- if tools %}<|im_start|>system
You call functions. Their signatures are within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call return JSON with its name and arguments within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-dict>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def smollm2(real_models):
    return real_models("smollm2-f32")


@pytest.fixture(scope="module")
def expected(reference):
    return reference("smollm2")


@pytest.mark.parametrize("precision", ["f32", "4bit"])
async def test_ids_are_those_of_the_file_and_of_llama_cpp(shared, real_models, expected, precision):
    checkpoint = real_models(f"smollm2-{precision}")
    async with shared(checkpoint, findings=FINDINGS) as backend:
        await require_ids_of_the_file(backend, checkpoint)
        await require_ids(backend, expected["texts"])


@pytest.mark.parametrize("name", PROMPTS)
async def test_greedy_replies_are_those_of_llama_cpp(shared, smollm2, expected, name):
    async with shared(smollm2, findings=FINDINGS) as backend:
        reply = await backend.stub.Predict(asked(name, len(expected["replies"][name]["reply"])))
        require_reply(reply, expected["replies"][name], BOUND)


@pytest.mark.parametrize(
    ("precision", "options", "bound"),
    [("bf16", [], 0.1), ("8bit", [], 0.5), ("4bit", [], 1.5), ("f32", ["kv_bits:8"], 0.5)],
)
async def test_fewer_bits_change_log_probabilities_little(
    shared, real_models, expected, precision, options, bound
):
    async with shared(
        real_models(f"smollm2-{precision}"), findings=FINDINGS, Options=options
    ) as backend:
        equal = 0
        for name in SHORT:
            reply = await backend.stub.Predict(asked(name, 16))
            equal += require_near(reply, expected["replies"][name], bound)
    assert equal >= len(SHORT)


async def test_requests_with_quantised_keys_run_together(shared, smollm2):
    options = {"findings": FINDINGS, "Options": ["kv_bits:8", "check_at_load:true"]}
    async with shared(smollm2, **options) as backend:
        calls = [asyncio.ensure_future(backend.stub.Predict(asked(name, 60))) for name in SHORT]

        def generating():
            return [one for one in backend.engine.status().requests if one.generated_tokens]

        await until(lambda: len(generating()) == len(SHORT))
        await asyncio.gather(*calls)


async def test_drafts_change_no_token(shared, smollm2):
    lines = "".join(f'{{"row": {n}, "state": "open"}}\n' for n in range(20, 32))
    common = {"Prompt": lines, "Tokens": 40, "IgnoreEOS": True, "Seed": 3}
    requests = [
        pb.PredictOptions(**common),
        pb.PredictOptions(**common, Temperature=0.7),
        asked("code", 24),
    ]
    async with shared(smollm2, findings=FINDINGS) as backend:
        await require_same(backend, requests)
        await until_accepted(backend, requests[0])


async def test_calls_are_written_and_read_as_a_template_of_hermes_says(shared, smollm2, tmp_path):
    template = tmp_path / "hermes.jinja"
    template.write_text(HERMES, encoding="utf-8")
    options = {"findings": FINDINGS, "Options": [f"chat_template:{template}"]}
    question = [user("What is the weather in Oslo for the next three days?")]
    async with shared(smollm2, **options) as backend:
        request = chat(question, tools=[WEATHER], ToolChoice="required", Tokens=120)
        prompt = list((await backend.stub.TokenizeString(request)).tokens)
        text = (await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=prompt))).content
        assert "<tools>" in text
        reply = await stream(backend.stub, request)
    assert reply.calls[0]["name"] == "get_weather"
    arguments = json.loads(reply.calls[0]["arguments"])
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])


async def test_a_stream_goes_on_when_its_engine_is_killed(shared, smollm2):
    request = pb.PredictOptions(
        Prompt=PROMPTS["code"], Tokens=40, IgnoreEOS=True, Temperature=0.8, Seed=3
    )
    async with shared(smollm2, findings=FINDINGS) as backend:
        alone = await stream(backend.stub, request)
        folded = Reply()
        async for reply in backend.stub.PredictStream(request):
            if not folded.replies:
                os.kill(backend.engine.process_id, signal.SIGKILL)
            folded.add(reply)
    assert folded.said == alone.said


async def test_a_batch_of_eight_says_what_each_says_alone(shared, smollm2):
    plain = [asked(name, 16) for name in PROMPTS]
    requests = [*plain, asked("code", 16, Temperature=0.9, Seed=11)]
    assert len(requests) == 8
    async with shared(smollm2, findings=FINDINGS) as backend:
        alone = [await backend.stub.Predict(request) for request in requests]
        async with backend.held(len(requests)):
            calls = [asyncio.ensure_future(backend.stub.Predict(one)) for one in requests]
        together = await asyncio.gather(*calls)
    for one, other in zip(alone, together, strict=True):
        assert [each["id"] for each in listed(one)] == [each["id"] for each in listed(other)]


async def test_a_seed_decides(shared, smollm2):
    def drawn(seed):
        return pb.PredictOptions(
            Prompt=PROMPTS["capital"], Tokens=24, IgnoreEOS=True, Temperature=1.0, Seed=seed
        )

    async with shared(smollm2, findings=FINDINGS) as backend:
        replies = [await backend.stub.Predict(drawn(seed)) for seed in (1, 1, 2)]
    texts = [reply.message for reply in replies]
    assert texts[0] == texts[1] != texts[2]


async def test_a_schema_holds_at_temperature_one(shared, smollm2):
    async with shared(smollm2, findings=FINDINGS) as backend:
        calls = [
            backend.stub.Predict(
                chat(
                    [user("Describe a person who likes tea.")],
                    Tokens=200,
                    Temperature=1.0,
                    Seed=seed,
                    Metadata={"json_schema": json.dumps(PERSON)},
                )
            )
            for seed in range(1, 5)
        ]
        for reply in await asyncio.gather(*calls):
            jsonschema.validate(json.loads(reply.message), PERSON)


async def test_an_object_by_the_grammar_of_the_host_ends(shared, smollm2):
    request = chat([user("Give a JSON object with a key city.")], Tokens=60)
    request.Grammar = (ROOT / "golden" / "gbnf" / "json_object.gbnf").read_text()
    async with shared(smollm2, findings=FINDINGS) as backend:
        reply = await stream(backend.stub, request)
    assert "city" in json.loads(reply.message)
    assert reply.last.tokens < request.Tokens


async def test_a_required_call_is_one_though_the_template_knows_no_tools(shared, smollm2):
    async with shared(smollm2, findings=FINDINGS) as backend:
        for seed in (0, 5):
            request = chat(
                [user("What is the weather in Oslo for the next three days?")],
                tools=[WEATHER],
                ToolChoice="required",
                Tokens=120,
                Temperature=1.0 if seed else 0.0,
                Seed=seed,
            )
            reply = await stream(backend.stub, request)
            call = reply.calls[0]  # more may follow, the last of them cut
            assert call["name"] == "get_weather"
            arguments = json.loads(call["arguments"])
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])
