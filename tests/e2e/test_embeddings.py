"""Embedding through the socket: equal to a direct computation, whatever runs beside it."""

import asyncio
import json

import grpc
import mlx.core as mx
import numpy as np
import pytest
from serving import code_of, served, stream
from transformers import AutoTokenizer
from waiting import until

from backend.core.engine_status import EngineState
from backend.pb import backend_pb2 as pb
from scripts.tiny_retrieval import build_embedder, strip_head

pytestmark = pytest.mark.mlx

TEXT = "be bi ba bo du " * 20
LONG_TEXT = "be bi ba bo du " * 300
# A long text has not ended before a snapshot shows it.
SLOWLY = ["prefill_chunk:4", "prefill_chunk_alone:4"]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


def hidden_states(network, directory, text):
    """Return the decoder's states of all tokens of a text, from one pass: [T, D]."""
    ids = AutoTokenizer.from_pretrained(directory)(text).input_ids
    while hasattr(network, "language_model"):
        network = network.language_model
    decoder = getattr(network, "model", None) or network.backbone
    return np.array(decoder(mx.array([ids]), cache=None)[0].astype(mx.float32))


async def embed(backend, text=TEXT, **fields):
    result = await backend.stub.Embedding(pb.PredictOptions(Embeddings=text, **fields))
    assert len(result.embeddings) == result.tokens * result.dim
    return result


def vector(result):
    assert (result.tokens, result.layout) == (1, pb.EMBEDDING_LAYOUT_FINAL)
    return np.array(result.embeddings)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5", "mamba2"]
)
async def test_a_plain_model_gives_the_mean_of_its_hidden_states(tiny_models, networks, family):
    expected = hidden_states(networks(family), tiny_models(family), TEXT).mean(axis=0)
    async with served(tiny_models(family), Options=["prefill_chunk:16"]) as backend:
        result = await embed(backend)
    assert vector(result) == pytest.approx(expected, abs=1e-4)
    assert result.dim == 64


async def test_pooling_is_what_the_option_says(tiny_models, networks):
    states = hidden_states(networks("qwen3"), tiny_models("qwen3"), TEXT)
    expected = {"mean": states.mean(axis=0), "last": states[-1], "cls": states[0]}
    for pooling, wanted in expected.items():
        async with served(tiny_models("qwen3"), Options=[f"pooling:{pooling}"]) as backend:
            assert vector(await embed(backend)) == pytest.approx(wanted, abs=1e-4)


async def test_without_pooling_every_token_has_a_vector(tiny_models, networks):
    states = hidden_states(networks("llama"), tiny_models("llama"), TEXT)
    options = ["pooling:none", "prefill_chunk:16"]
    async with served(tiny_models("llama"), Options=options) as backend:
        result = await embed(backend)
    assert result.layout == pb.EMBEDDING_LAYOUT_PER_TOKEN
    assert result.tokens == result.prompt_tokens == len(states)
    assert np.array(result.embeddings) == pytest.approx(states.ravel(), abs=1e-4)


async def test_an_embedder_pools_and_normalises_as_its_files_say(tmp_path):
    directory = build_embedder("qwen3", tmp_path / "m", parts=("Normalize",))
    async with served(directory) as backend:
        normalised = vector(await embed(backend))
    (directory / "modules.json").unlink()
    async with served(directory) as backend:
        last = vector(await embed(backend))
    assert normalised == pytest.approx(last / np.linalg.norm(last), abs=1e-6)
    assert np.linalg.norm(last) != pytest.approx(1.0)


async def test_a_decoder_without_its_head_embeds_the_same(tmp_path):
    directory = build_embedder("qwen3", tmp_path / "m", parts=("Normalize",))
    async with served(directory) as backend:
        whole = vector(await embed(backend))
    async with served(strip_head(directory)) as backend:
        assert vector(await embed(backend)) == pytest.approx(whole, abs=1e-6)


@pytest.mark.smoke
async def test_token_ids_are_read_as_they_are(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        ids = AutoTokenizer.from_pretrained(tiny_models("llama"))(TEXT).input_ids
        result = await backend.stub.Embedding(pb.PredictOptions(EmbeddingTokens=ids))
        assert result.prompt_tokens == len(ids)
        assert vector(result) == pytest.approx(vector(await embed(backend)), abs=1e-5)
        wrong = pb.PredictOptions(EmbeddingTokens=[1, 5000])
        code, details = await code_of(backend.stub.Embedding(wrong))
    assert code is INVALID
    assert details == "EmbeddingTokens: token id 5000 is outside the vocabulary of 512 tokens"


async def test_an_input_that_is_too_long_is_refused_with_both_numbers(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=16) as backend:
        for request in (
            pb.PredictOptions(Embeddings="ba " * 17),
            pb.PredictOptions(EmbeddingTokens=[1] * 17),
        ):
            code, details = await code_of(backend.stub.Embedding(request))
            assert code is INVALID
            assert "tokens do not fit: this model's maximum context length is 16 tokens" in details
        whole = await backend.stub.Embedding(pb.PredictOptions(EmbeddingTokens=[1] * 16))
        assert whole.prompt_tokens == 16


async def test_with_truncate_the_beginning_is_embedded(tiny_models):
    options = {"MaxModelLen": 16, "Options": ["truncate:true"]}
    async with served(tiny_models("llama"), **options) as backend:
        ids = AutoTokenizer.from_pretrained(tiny_models("llama"))(TEXT).input_ids
        cut = await embed(backend)
        same = await backend.stub.Embedding(pb.PredictOptions(EmbeddingTokens=ids[:16]))
        assert cut.prompt_tokens == 16
        assert vector(cut) == pytest.approx(vector(same), abs=1e-5)


async def test_nothing_to_embed_is_refused_by_name(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        code, details = await code_of(backend.stub.Embedding(pb.PredictOptions(Prompt="ba")))
    assert (code, details) == (INVALID, "Embeddings: is empty, and so is EmbeddingTokens")


@pytest.mark.parametrize("field", ["Images", "Audios", "Videos"])
async def test_media_are_refused_by_name(shared, tiny_models, field):
    async with shared(tiny_models("llama")) as backend:
        request = pb.PredictOptions(Embeddings="ba be", **{field: ["AAAA"]})
        code, details = await code_of(backend.stub.Embedding(request))
        assert (code, details.startswith(field)) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_text_without_end_is_refused_where_no_context_limits_it(tiny_models, monkeypatch):
    monkeypatch.setattr("backend.pipeline.scores.MAX_TOKEN_IDS", 40)
    async with served(tiny_models("mamba2")) as backend:
        code, details = await code_of(
            backend.stub.Embedding(pb.PredictOptions(Embeddings="7" * 500))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 40" in details
        embedded = await backend.stub.Embedding(pb.PredictOptions(Embeddings="7"))
        assert embedded.dim


async def test_more_vectors_than_a_message_holds_are_refused(tiny_models):
    options = {"MaxModelLen": 300_000, "Options": ["pooling:none"]}
    async with served(tiny_models("mamba2"), **options) as backend:
        tokens = pb.PredictOptions(EmbeddingTokens=[1] * 210_000)
        code, details = await code_of(backend.stub.Embedding(tokens))
    assert code is INVALID
    assert "210000 vectors of 64 numbers" in details


@pytest.mark.parametrize(
    ("pooling", "parts", "reason"),
    [("max_tokens", (), "max"), ("mean_tokens", ("Dense",), "dense")],
)
async def test_what_a_checkpoint_asks_for_in_vain_is_unimplemented(
    tmp_path, pooling, parts, reason
):
    directory = build_embedder("llama", tmp_path / "m", pooling=pooling, parts=parts)
    async with served(directory) as backend:
        code, details = await code_of(embed(backend))
        assert (await backend.stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=2))).tokens
    assert code is UNIMPLEMENTED
    assert reason in details


async def test_attention_that_looks_ahead_is_unimplemented(tiny_models, tmp_path):
    directory = tmp_path / "m"
    directory.mkdir()
    for path in tiny_models("gemma3_text").iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").unlink()
    config["use_bidirectional_attention"] = True
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    async with served(directory) as backend:
        code, details = await code_of(embed(backend))
    assert code is UNIMPLEMENTED
    assert "looks ahead" in details


async def test_an_encoder_of_another_type_cannot_be_loaded(tmp_path):
    build_embedder("llama", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "mpnet"}))
    async with served() as backend:
        code, details = await code_of(backend.load(tmp_path / "m"))
    assert code is INVALID
    assert "mpnet" in details


async def test_a_storm_of_embeddings_changes_no_token_of_the_streams(tiny_models):
    prompts = ["ba bi bo", "du da di"]
    asked = [pb.PredictOptions(Prompt=p, Tokens=40, IgnoreEOS=True) for p in prompts]
    texts = [f"{i} " + "be bi ba bo " * (i % 7) for i in range(40)]
    async with served(tiny_models("llama"), Options=["prefill_chunk:16"]) as backend:
        alone = [(await stream(backend.stub, request)).message for request in asked]
        single = [vector(await embed(backend, text)) for text in texts]
        results = await asyncio.gather(
            *(stream(backend.stub, request) for request in asked),
            *(embed(backend, text) for text in texts),
        )
    assert [reply.message for reply in results[:2]] == alone
    assert all(reply.last.tokens == 40 for reply in results[:2])
    for result, expected in zip(results[2:], single, strict=True):
        assert vector(result) == pytest.approx(expected, abs=1e-5)


async def test_more_calls_than_may_wait_are_refused(tiny_models):
    async with served(tiny_models("llama"), Options=["max_waiting:2", *SLOWLY]) as backend:
        # They come at once: even the first of them has not ended before the last is refused.
        calls = [embed(backend, 5 * TEXT) for _ in range(8)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refused = [o.code() for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert 1 <= len(outcomes) - len(refused) < 8
        assert (await embed(backend)).tokens == 1


async def test_free_ends_what_waits(tiny_models):
    async with served(tiny_models("llama"), Options=SLOWLY) as backend:
        calls = [asyncio.create_task(code_of(embed(backend, LONG_TEXT))) for _ in range(8)]
        await until(lambda: backend.engine.status().state is EngineState.BUSY)
        await backend.stub.Free(pb.HealthMessage())
        outcomes = await asyncio.gather(*calls)
    # One that came after it finds no model.
    late = grpc.StatusCode.FAILED_PRECONDITION
    assert {code for code, _ in outcomes} - {late} == {grpc.StatusCode.ABORTED}


async def test_a_caller_that_leaves_makes_room(tiny_models):
    async with served(tiny_models("llama"), Options=["max_waiting:0", *SLOWLY]) as backend:
        call = backend.stub.Embedding(pb.PredictOptions(Embeddings=LONG_TEXT))
        await until(lambda: backend.engine.status().state is EngineState.BUSY)
        assert (await code_of(embed(backend)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await until(lambda: backend.engine.status().state is EngineState.READY)
        assert (await embed(backend)).tokens == 1
