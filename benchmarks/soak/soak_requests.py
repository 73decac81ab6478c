"""The requests of the soak's clients: requests of every kind, and malformed ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from google.protobuf.message import Message

from backend.pb import backend_pb2 as pb
from benchmarks.harness.workload import words

LONG_PROMPT_WORDS = 250
_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the weather of a city.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 12}},
                    "required": ["city"],
                },
            },
        }
    ]
)
_QUESTIONS = ("What is the weather in Oslo?", "Who are you?", "Tell me a story.", "Hello!")
_GRAMMARS = (
    'root ::= ("ba" | "be" | "bi"){3,9}',
    '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}',
)


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request with one correct reply.

    Attributes:
        shape: Its kind in reports.
        method: The RPC.
    """

    shape: str
    method: str
    request: Message


def asks(count: int, seed: int) -> tuple[Ask, ...]:
    """Return requests, each kind about equally often; the same for the same seed."""
    rng = Random(seed)
    makers = (_text, _long_text, _chat, _forced_call, _grammar, _logprobs, _embedding, _score)
    return tuple(makers[number % len(makers)](rng) for number in range(count))


def malformed() -> Sequence[tuple[str, bytes]]:
    """Return methods with requests that they must refuse."""
    requests = (
        pb.PredictOptions(Prompt="x", Temperature=-1.0),
        pb.PredictOptions(Prompt="x", Grammar="root ::= other"),
        pb.PredictOptions(Prompt="x", LogitBias="{"),
        pb.PredictOptions(Prompt="x " * 60_000),
        pb.PredictOptions(Prompt="x", Tools="[" * 9999),
        pb.PredictOptions(),
    )
    return (
        *(("Predict", request.SerializeToString()) for request in requests),
        *(("PredictStream", request.SerializeToString()) for request in requests),
        *(("Predict", b"\xff" * 30), ("Score", b""), ("Embedding", b""), ("LoadModel", b"")),
    )


def _sampled(rng: Random) -> dict[str, float | int]:
    """Return a greedy sampling, or a seeded one: both have one correct outcome."""
    if rng.random() < 0.5:
        return {}
    return {"Temperature": 0.8, "TopP": 0.95, "Seed": rng.randint(1, 2**30)}


def _predict(shape: str, rng: Random, request: pb.PredictOptions) -> Ask:
    return Ask(shape, rng.choice(("Predict", "PredictStream")), request)


def _text(rng: Random) -> Ask:
    prompt = words(rng.randint(1, 12), rng.randint(0, 9))
    request = pb.PredictOptions(
        Prompt=prompt, Tokens=rng.randint(1, 60), IgnoreEOS=True, **_sampled(rng)
    )
    return _predict("text", rng, request)


def _long_text(rng: Random) -> Ask:
    # Few beginnings, so that the prompt cache has hits and evictions.
    prompt = words(LONG_PROMPT_WORDS, rng.randint(0, 3)) + " " + words(5, rng.randint(0, 99))
    request = pb.PredictOptions(Prompt=prompt, Tokens=8, IgnoreEOS=True, **_sampled(rng))
    return _predict("long text", rng, request)


def _conversation(rng: Random) -> dict[str, object]:
    message = pb.Message(role="user", content=rng.choice(_QUESTIONS))
    return {"UseTokenizerTemplate": True, "Messages": [message], "Tokens": 80}


def _chat(rng: Random) -> Ask:
    tools = _TOOLS if rng.random() < 0.5 else ""
    request = pb.PredictOptions(**_conversation(rng), Tools=tools, **_sampled(rng))
    return _predict("chat", rng, request)


def _forced_call(rng: Random) -> Ask:
    request = pb.PredictOptions(
        **_conversation(rng), Tools=_TOOLS, ToolChoice="required", **_sampled(rng)
    )
    return _predict("tool call", rng, request)


def _grammar(rng: Random) -> Ask:
    request = pb.PredictOptions(
        Prompt=words(3, rng.randint(0, 9)),
        Grammar=rng.choice(_GRAMMARS),
        Tokens=40,
        **_sampled(rng),
    )
    return _predict("grammar", rng, request)


def _logprobs(rng: Random) -> Ask:
    prompt = words(5, rng.randint(0, 9))
    request = pb.PredictOptions(Prompt=prompt, Tokens=12, Logprobs=3, IgnoreEOS=True)
    return _predict("logprobs", rng, request)


def _embedding(rng: Random) -> Ask:
    text = words(rng.randint(1, 40), rng.randint(0, 99))
    return Ask("embedding", "Embedding", pb.PredictOptions(Embeddings=text))


def _score(rng: Random) -> Ask:
    candidates = [words(2, rng.randint(0, 99)) for _ in range(3)]
    prompt = words(rng.randint(1, 60), rng.randint(0, 9))
    return Ask("score", "Score", pb.ScoreRequest(prompt=prompt, candidates=candidates))
