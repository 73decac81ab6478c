"""InspectPromptCache and the command `cache` over the socket, on a real engine."""

import asyncio
import json

import grpc
import pytest
from click.testing import CliRunner
from serving import UNENDING, chat, code_of, served, user
from waiting import until

from backend.cli.app import main
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from scripts.tiny_encoders import build_encoder

pytestmark = pytest.mark.mlx

SESAME = "s3cret"
METADATA = (("authorization", f"Bearer {SESAME}"),)
SYSTEM = {"role": "system", "content": "You help. " + "be bi ba bo du " * 24}
SETTINGS = {"Tokens": 4, "IgnoreEOS": True}
CODE = grpc.StatusCode


def asked(question, **metadata):
    return chat([SYSTEM, user(question)], Metadata=metadata, **SETTINGS)


def looked(backend, **fields):
    inspector = backend_pb2_grpc.InspectorStub(backend.channel)
    return inspector.InspectPromptCache(pb.InspectPromptCacheRequest(**fields), metadata=METADATA)


async def run_cache(backend, *arguments, token=""):
    command = ["cache", "--addr", backend.address, *arguments]
    environment = {"LOCALAI_GRPC_AUTH_TOKEN": token}
    result = await asyncio.to_thread(CliRunner(env=environment).invoke, main, command)
    assert result.exit_code == 0, result.stderr
    return result.output


async def test_conversations_are_told_below_the_system_prompt_that_they_share(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=8192) as backend:
        for question in ("ba?", "du?", "ki?"):
            await backend.stub.Predict(asked(question))
        await until(lambda: backend.is_idle)
        reply = await looked(backend)
        told = await run_cache(backend)
        few = json.loads(await run_cache(backend, "--nodes", "2", "--json"))
        running = backend.stub.PredictStream(
            chat([SYSTEM, user("so?")], IgnoreEOS=True, **UNENDING)
        )
        await running.read()
        meanwhile = await looked(backend)
        running.cancel()
    (root,) = [prefix for prefix in reply.prefixes if not prefix.parent]
    below = [prefix for prefix in reply.prefixes if prefix.parent == root.number]
    assert (root.place, root.is_pinned, root.hits) == ("system", True, 2)
    assert len(below) == 3
    assert {prefix.start for prefix in below} == {root.tokens}
    assert sum(prefix.bytes for prefix in reply.prefixes) == reply.books.bytes
    assert not any(prefix.words for prefix in reply.prefixes)
    assert sum(span.hit_tokens for span in reply.spans) == reply.books.hit_tokens > 100
    lines = [line.split() for line in told.splitlines()]
    assert ["system", "0", str(root.tokens)] in [line[:3] for line in lines]
    assert sum(line[:2] == ["├", "prompt"] for line in lines) == 3
    assert [prefix["number"] for prefix in few["prefixes"]] == [1, 2]
    assert not any(prefix.is_in_use for prefix in reply.prefixes)
    assert {prefix.start for prefix in meanwhile.prefixes if prefix.is_in_use} >= {0, root.tokens}


async def test_what_was_evicted_and_came_again_is_told(tiny_models):
    options = ["max_cache_bytes:200000"]
    async with served(tiny_models("llama"), MaxModelLen=8192, Options=options) as backend:
        prompts = [f"{word} " * 150 for word in ("ba", "be", "bi")]
        for prompt in (*prompts, prompts[0]):
            reply = await backend.stub.Predict(pb.PredictOptions(Prompt=prompt, **SETTINGS))
            await until(lambda: backend.is_idle)
        listing = await looked(backend)
        told = await run_cache(backend)
    assert 0 < listing.recomputed_tokens <= reply.prompt_tokens + 4
    assert listing.recomputed[0].times == 1
    assert "computed again after they were evicted" in told


async def test_words_are_told_with_a_token_and_those_of_a_scope_to_who_names_it(tiny_models):
    directory = tiny_models("llama")
    async with served(directory, auth_token=SESAME, MaxModelLen=8192) as backend:
        for question, metadata in (
            ("du du du", {}),
            ("ko ko ko", {"cache_scope": "anna", "cache_public": "system"}),
            ("lu lu lu", {"cache_scope": "bert", "cache_public": "system"}),
        ):
            await backend.stub.Predict(asked(question, **metadata), metadata=METADATA)
        await until(lambda: backend.is_idle)
        unnamed = "".join(prefix.words for prefix in (await looked(backend, words=True)).prefixes)
        named = await looked(backend, words=True, cache_scope="anna")
        told = await run_cache(backend, "--words", "--scope", "bert", token=SESAME)
    for_anna = "".join(prefix.words for prefix in named.prefixes)
    assert "You help. be" in unnamed
    assert [word in unnamed for word in ("du du du", "ko", "lu")] == [True, False, False]
    assert [word in for_anna for word in ("du du du", "ko ko ko", "lu")] == [True, True, False]
    assert "[scope]" in for_anna
    assert ("lu lu lu" in told, "ko" in told) == (True, False)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"words": True}, "words: prompts are shown only by a backend that has a token"),
        ({"max_prefixes": 1025}, "max_prefixes: must be at most 1024, not 1025"),
        ({"cache_scope": "a\nb"}, "cache_scope: must be at most 128 printable characters"),
    ],
)
async def test_a_look_that_may_not_be_is_refused_with_its_field(fields, problem):
    async with served() as backend:
        code, details = await code_of(looked(backend, **fields))
    assert (code, details.startswith(problem)) == (CODE.INVALID_ARGUMENT, True)


async def test_without_a_model_there_is_nothing_to_look_at(tmp_path):
    async with served() as backend:
        assert (await code_of(looked(backend)))[0] is CODE.FAILED_PRECONDITION
        await backend.load(build_encoder("bert", tmp_path))
        code, details = await code_of(looked(backend))
    assert (code, "it has no prompt cache" in details) == (CODE.UNIMPLEMENTED, True)
