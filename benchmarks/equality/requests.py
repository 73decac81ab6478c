"""Requests of every kind whose reply must be the same with and without drafts."""

import base64
import io
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from backend.pb import backend_pb2 as pb
from benchmarks.harness.workload import words

CONTEXT = 640
# Ids of ordinary tokens in every tiny vocabulary.
_LEAST_ID, _MOST_ID = 300, 490
_MAX_TOKENS = 64
_OPEN_SHARE = 0.1
_BEGINNINGS, _BEGINNING_WORDS = 4, 30
_GRAMMARS = (
    'root ::= ("ba" | "be" | "bi" | "bo"){9,40}',
    'root ::= ("temperature of the day: " [0-9] [0-9]? " degrees\\n"){4,9}',
    json.dumps(
        {
            "type": "object",
            "properties": {
                "measured_at": {"enum": ["morning", "evening"]},
                "wind_direction": {"enum": ["north", "south"]},
                "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
            },
            "required": ["measured_at", "wind_direction", "values"],
            "additionalProperties": False,
        }
    ),
)
_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "maxLength": 12},
                        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                    },
                    "required": ["city", "temperature_unit"],
                },
            },
        }
        for name in ("get_weather_forecast", "get_weather_history")
    ]
)


def requests_of(rng: Random, count: int, *, sees: bool) -> Sequence[pb.PredictOptions]:
    """Return requests, each kind about equally often; each has its own seed.

    Args:
        rng: Makes all choices.
        count: The number of requests.
        sees: Whether some of them have images.
    """
    kinds = [_repeating, _repeating, _repeating, _text, _listing, _guided, _call]
    kinds += [_picture] * 4 if sees else []
    return [_request(rng, kinds[number % len(kinds)]) for number in range(count)]


def _request(rng: Random, kind: Callable[[Random], dict[str, Any]]) -> pb.PredictOptions:
    fields = {"Tokens": rng.randint(8, _MAX_TOKENS), **_sampling(rng), **kind(rng)}
    if rng.random() < _OPEN_SHARE and "Prompt" in fields:
        fields["Tokens"] = 0
    return pb.PredictOptions(Logprobs=1, TopLogprobs=2, **fields)


def _sampling(rng: Random) -> dict[str, Any]:
    seed = rng.randint(1, 2**30)
    return rng.choice(
        (
            {},
            {"Temperature": 0.3, "Seed": seed},
            {"Penalty": 1.1, "PresencePenalty": 0.3, "FrequencyPenalty": 0.01},
            {"Temperature": 0.2, "Seed": seed, "FrequencyPenalty": 0.2, "Repeat": 5},
            {"Temperature": 0.5, "TopK": 3, "TopP": 0.9, "Seed": seed},
            {"Temperature": 1.5, "MinP": 0.1, "Seed": seed},
        )
    )


def _prompt(rng: Random) -> str:
    """Return a text with one of a few beginnings, so that the prompt cache has hits."""
    begin = words(rng.randint(1, _BEGINNING_WORDS), rng.randrange(_BEGINNINGS))
    return f"{begin} {words(rng.randint(1, 20), rng.randrange(1000))}"


def _text(rng: Random) -> dict[str, Any]:
    return {"Prompt": _prompt(rng), "IgnoreEOS": rng.random() < 0.7}


def _repeating(rng: Random) -> dict[str, Any]:
    """Ask for a text of few different tokens: many drafts are accepted, many nearly so."""
    few = rng.sample(range(_LEAST_ID, _MOST_ID), rng.randint(1, 3))
    bias = json.dumps({str(token_id): 60 for token_id in few})
    return {"Prompt": _prompt(rng), "LogitBias": bias, "IgnoreEOS": rng.random() < 0.7}


def _listing(rng: Random) -> dict[str, Any]:
    """Ask for the continuation of a list whose last entry occurred before, with another end."""
    entry = words(3, rng.randrange(1000))
    lines = "".join(f"{entry} {words(1, n)}\n" for n in range(rng.randint(2, 6)))
    return {"Prompt": lines + entry, "IgnoreEOS": True}


def _guided(rng: Random) -> dict[str, Any]:
    return {"Prompt": _prompt(rng), "Grammar": rng.choice(_GRAMMARS), "Tokens": 100}


def _chat(rng: Random) -> dict[str, Any]:
    message = pb.Message(role="user", content=words(rng.randint(2, 9), rng.randrange(9)))
    return {"UseTokenizerTemplate": True, "Messages": [message]}


def _call(rng: Random) -> dict[str, Any]:
    thinks = {"enable_thinking": rng.choice(("true", "false")), "thinking_budget": "12"}
    more = {"Tools": _TOOLS, "ToolChoice": "required", "Tokens": 100, "Metadata": thinks}
    return _chat(rng) | more


def _picture(rng: Random) -> dict[str, Any]:
    pictures = [_noise(rng.randrange(5)) for _ in range(rng.randint(1, 2))]
    more = rng.choice((_repeating, _text))(rng)
    del more["Prompt"]
    return _chat(rng) | {"Images": pictures, **more}


def _noise(seed: int) -> str:
    """Return an image of coloured noise, base64."""
    from PIL import Image

    image = Image.frombytes("RGB", (64, 64), Random(seed).randbytes(3 * 64 * 64))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
