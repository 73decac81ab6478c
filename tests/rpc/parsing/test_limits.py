"""Limits of one request: each is inclusive, and its refusal names field and number."""

import json

import pytest
from scripted_engine import ScriptedEngine, served, stub
from serving import code_of

from backend import config
from backend.config import ModelOptions
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.checks import parse_json
from backend.rpc.parsing.generation_fields import generation_call
from backend.rpc.parsing.load_options import model_options
from backend.rpc.parsing.message_fields import messages, offer
from backend.rpc.parsing.scoring_fields import embedding_call, rerank_call, score_call

OPTIONS = ModelOptions(model="org/tiny")


def predict(**fields):
    return generation_call(pb.PredictOptions(Prompt="x", **fields), OPTIONS)


def offered(count):
    return offer(json.dumps([{"name": f"f{number}"} for number in range(count)])).tools


def nested(depth):
    return parse_json("Tools", "[" * depth + "]" * depth)


def said(count):
    return messages(pb.PredictOptions(Messages=[pb.Message(role="user")] * count))


LIMITED = {
    "messages": ("Messages", config.MAX_MESSAGES, said),
    "tools": ("Tools", config.MAX_TOOLS, offered),
    "json depth": ("Tools", config.MAX_JSON_DEPTH, nested),
    "json size": (
        "Metadata",
        config.MAX_JSON_CHARS,
        lambda size: parse_json("Metadata", '"' + "x" * (size - 2) + '"'),
    ),
    "logit biases": (
        "LogitBias",
        config.MAX_LOGIT_BIASES,
        lambda count: predict(LogitBias=json.dumps({str(n): 1 for n in range(count)})),
    ),
    "stop strings": (
        "StopPrompts",
        config.MAX_STOP_STRINGS,
        lambda count: predict(StopPrompts=map(str, range(count))),
    ),
    "stop string": (
        "StopPrompts",
        config.MAX_STOP_STRING_CHARS,
        lambda size: predict(StopPrompts=["x" * size]),
    ),
    "top logprobs": (
        "TopLogprobs",
        config.MAX_TOP_LOGPROBS,
        lambda count: predict(TopLogprobs=count),
    ),
    "request id": (
        "CorrelationId",
        config.MAX_REQUEST_ID_CHARS,
        lambda size: predict(CorrelationId="x" * size),
    ),
    "cache path": (
        "PromptCachePath",
        config.MAX_PATH_BYTES,
        lambda size: predict(PromptCachePath="/" * size),
    ),
    "token ids": (
        "EmbeddingTokens",
        config.MAX_TOKEN_IDS,
        lambda count: embedding_call(pb.PredictOptions(EmbeddingTokens=[1] * count)),
    ),
    "candidates": (
        "candidates",
        config.MAX_CANDIDATES,
        lambda count: score_call(pb.ScoreRequest(prompt="x", candidates=["y"] * count)),
    ),
    "documents": (
        "documents",
        config.MAX_CANDIDATES,
        lambda count: rerank_call(pb.RerankRequest(query="x", documents=["y"] * count)),
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_is_inclusive_and_told(name):
    field, limit, ask = LIMITED[name]
    ask(limit)
    with pytest.raises(InvalidRequestError) as caught:
        ask(limit + 1)
    assert str(caught.value).startswith(field)
    assert str(limit) in str(caught.value)


def test_a_negative_length_of_the_stable_prefix_is_refused():
    request = pb.ScoreRequest(prompt="x", candidates=["y"], stable_prefix_len=-1)
    with pytest.raises(InvalidRequestError, match="stable_prefix_len: must be at least 0, not -1"):
        score_call(request)


@pytest.mark.parametrize("text", ['"' + "[" * 500 + '"', r'["\"[[[", ' + '"[", ' * 500 + '"]"]'])
def test_brackets_inside_of_strings_nest_nothing(text):
    assert parse_json("Tools", text) == json.loads(text)


@pytest.mark.parametrize("path", ["a\0b", "é" * 128, "a/" + "x" * 256 + "/b"])
def test_what_no_file_can_be_named_is_refused(path):
    with pytest.raises(InvalidRequestError, match="PromptCachePath"):
        predict(PromptCachePath=path)
    for field in ("Model", "ModelFile", "ModelPath", "Tokenizer", "LoraAdapter"):
        with pytest.raises(InvalidRequestError, match=field):
            model_options(pb.ModelOptions(**{"Model": "x", field: path}))


async def test_a_large_request_is_parsed_beside_the_loop_and_refused_alike():
    large = "x" * config.INLINE_REQUEST_BYTES
    async with served(ScriptedEngine()) as channel:
        for prompt in ("x", large):
            request = pb.PredictOptions(Prompt=prompt, Tools="{")
            code, details = await code_of(stub(channel).Predict(request))
            assert code.name == "INVALID_ARGUMENT"
            assert details.startswith("Tools: ")


async def test_too_many_ids_are_not_made_a_text():
    request = pb.DetokenizeRequest(tokens=[1] * (config.MAX_TOKEN_IDS + 1))
    async with served(ScriptedEngine()) as channel:
        code, details = await code_of(stub(channel).Detokenize(request))
    assert (code.name, str(config.MAX_TOKEN_IDS) in details) == ("INVALID_ARGUMENT", True)


def test_a_number_of_too_many_digits_is_refused_without_advice_to_programmers():
    with pytest.raises(InvalidRequestError) as caught:
        parse_json("LogitBias", "[" + "9" * 5000 + "]")
    assert str(caught.value).startswith("LogitBias: is not valid JSON: Exceeds the limit (4300")
    assert str(caught.value).endswith("value has 5000 digits")
