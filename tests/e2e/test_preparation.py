"""Texts on their way to the engine: bounded in length, and small ones never wait for large ones."""

import asyncio
import subprocess
import sys

import grpc
import pytest
from serving import code_of, served
from waiting import until

from backend.config import MAX_CHARS_PER_TOKEN, MAX_TOKEN_IDS
from backend.model.text.isolated import long_texts
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

LIMIT = MAX_CHARS_PER_TOKEN * MAX_TOKEN_IDS
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(tiny_models):
    text = "ba " * (LIMIT // 3 + 1)
    async with served(tiny_models("llama")) as backend:
        tokenize = backend.stub.TokenizeString(pb.PredictOptions(Prompt=text))
        assert await code_of(tokenize) == (
            INVALID,
            f"Prompt: holds {len(text)} characters; texts of at most {LIMIT} are tokenised",
        )
        message = pb.Message(role="user", content=text)
        chat = pb.PredictOptions(UseTokenizerTemplate=True, Messages=[message])
        code, details = await code_of(backend.stub.TokenizeString(chat))
        assert (code, details.startswith("Messages: holds")) == (INVALID, True)


async def test_a_small_request_does_not_wait_for_six_large_ones(tiny_models):
    large = pb.PredictOptions(Prompt="ba be bi bo bu " * (LIMIT // 16))
    async with served(tiny_models("llama")) as backend:
        calls = [asyncio.ensure_future(backend.stub.TokenizeString(large)) for _ in range(6)]
        reply = await backend.stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=3, IgnoreEOS=True))
        assert reply.tokens == 3
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        # Those that have begun end between two parts of their text: the next one has its turn.
        text = "ba be bi " * 5000
        found = await backend.stub.TokenizeString(pb.PredictOptions(Prompt=text))
        assert found.length >= 15_000


@pytest.mark.parametrize("letter", ["x", "\n", "🙂"])
async def test_forty_texts_without_places_hold_up_no_other_caller(tiny_models, monkeypatch, letter):
    """The process that would read them never even starts."""
    started = []

    def start(number):
        code = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(subprocess.Popen(code, pass_fds=[number]))
        return started[-1]

    monkeypatch.setattr(long_texts, "start_process", start)
    long = pb.PredictOptions(Prompt=letter * 200_000)
    small = pb.PredictOptions(Prompt="ba", Tokens=3, IgnoreEOS=True)
    async with served(tiny_models("llama")) as backend:
        calls = [asyncio.ensure_future(backend.stub.TokenizeString(long)) for _ in range(40)]
        await until(lambda: started)
        assert (await backend.stub.Predict(small)).tokens == 3
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await until(lambda: started[0].poll() is not None)
        monkeypatch.undo()
        found = await backend.stub.TokenizeString(long)
        assert found.length > 1000
