"""SmolLM2-135M-Instruct through the socket: equal to llama.cpp, and to itself in every way."""

import asyncio
import json
import os
import signal

import jsonschema
import pytest
from real_answers import (
    FINDINGS,
    asked,
    listed,
    require_ids,
    require_ids_of_the_file,
    require_reply,
)
from serving import Reply, chat, stream, user

from backend.pb import backend_pb2 as pb
from scripts.real_models.prompts import PROMPTS

pytestmark = pytest.mark.mlx

# The largest distance of a log-probability from llama.cpp's in float32.
BOUND = 5e-4
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
