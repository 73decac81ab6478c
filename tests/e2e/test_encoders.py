"""Encoders and cross-encoders through the socket: equal to mlx-vlm's own classes, text by text."""

import asyncio
import json
import sys
import time

import grpc
import mlx.core as mx
import numpy as np
import pytest
from real_process import TIMEOUT_S, real_backend
from serving import code_of, served, stream
from transformers import AutoTokenizer

from backend.config import ModelOptions
from backend.engine.grammars.pool import WARM_UP_DELAY_S
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.mends import mend
from backend.model.loader import load
from backend.pb import backend_pb2 as pb
from common.remedies import CHECKOUT
from scripts.tiny_encoders import POSITIONS, build_cross_encoder, build_encoder
from scripts.tiny_retrieval import add_modules

pytestmark = pytest.mark.mlx

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
TYPES = ["bert", "roberta", "xlm-roberta", "modernbert"]
TEXTS = ["la li lo", "be bi ba bo du " * 6, "x", "Ki, ko ku! " * 3, "na", "so", "so so si"]
DOCUMENTS = ["la bo", "du da di " * 8, "is it", "ba bo bi", "", "so si " * 12]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {name: build_encoder(name, root / name) for name in (*TYPES, "llama_bidirec")}


@pytest.fixture(scope="module")
def cross_encoders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cross-encoders")
    return {name: build_cross_encoder(name, root / name) for name in TYPES}


def as_upstream_names_it(directory, copy):
    """Return the model for mlx-vlm's own loaders, which know RoBERTa by one of its names."""
    copy.mkdir()
    for path in directory.iterdir():
        if path.name != "config.json":
            (copy / path.name).symlink_to(path)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "roberta":
        config["model_type"] = "xlm-roberta"
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def hidden_states(directory, copy, texts):
    """Return mlx-vlm's states of each text by itself: [T, D]."""
    from mlx_vlm.embedding_loader import load_embedding_model

    network = load_embedding_model(as_upstream_names_it(directory, copy))
    mend(network)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    states = (network(mx.array([tokenizer(text).input_ids])).last_hidden_state for text in texts)
    return [np.array(each[0]) for each in states]


async def embed(backend, text):
    return await backend.stub.Embedding(pb.PredictOptions(Embeddings=text))


async def vectors(backend, texts):
    return np.array([(await embed(backend, text)).embeddings for text in texts])


async def vectors_at_once(backend, texts):
    results = await asyncio.gather(*(embed(backend, text) for text in texts))
    return np.array([result.embeddings for result in results])


@pytest.mark.parametrize("model_type", [*TYPES, "llama_bidirec"])
async def test_an_encoder_gives_the_mean_of_all_tokens(shared, encoders, model_type, tmp_path):
    states = hidden_states(encoders[model_type], tmp_path / "m", TEXTS)
    async with shared(encoders[model_type]) as backend:
        result = await embed(backend, TEXTS[1])
        single = await vectors(backend, TEXTS)
        together = await vectors_at_once(backend, TEXTS)
    assert (result.tokens, result.dim, result.layout) == (1, 64, pb.EMBEDDING_LAYOUT_FINAL)
    assert result.prompt_tokens == len(states[1])
    assert single == pytest.approx(np.array([each.mean(axis=0) for each in states]), abs=1e-5)
    assert together == pytest.approx(single, abs=1e-5)


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ("cls_token", lambda states: states[0]),
        ("lasttoken", lambda states: states[-1]),
        ("mean_tokens", lambda states: states.mean(axis=0)),
    ],
)
async def test_an_encoder_pools_and_normalises_as_its_files_say(encoders, mode, pool, tmp_path):
    states = hidden_states(encoders["bert"], tmp_path / "upstream", TEXTS)
    directory = add_modules(
        build_encoder("bert", tmp_path / "m"), pooling=mode, parts=("Normalize",)
    )
    async with served(directory) as backend:
        found = await vectors_at_once(backend, TEXTS)
    expected = [pool(each) / np.linalg.norm(pool(each)) for each in states]
    assert found == pytest.approx(np.array(expected), abs=1e-5)


async def test_an_encoder_without_pooling_gives_every_token_a_vector(encoders, tmp_path):
    states = hidden_states(encoders["bert"], tmp_path / "m", TEXTS)
    async with served(encoders["bert"], Options=["pooling:none"]) as backend:
        results = await asyncio.gather(*(embed(backend, text) for text in TEXTS))
    for result, expected in zip(results, states, strict=True):
        assert result.layout == pb.EMBEDDING_LAYOUT_PER_TOKEN
        assert result.tokens == len(expected)
        assert np.array(result.embeddings) == pytest.approx(expected.ravel(), abs=1e-5)


async def test_token_ids_are_read_as_they_are(shared, encoders):
    ids = AutoTokenizer.from_pretrained(encoders["bert"])(TEXTS[1]).input_ids
    async with shared(encoders["bert"]) as backend:
        result = await backend.stub.Embedding(pb.PredictOptions(EmbeddingTokens=ids))
        text = await embed(backend, TEXTS[1])
        wrong = pb.PredictOptions(EmbeddingTokens=[1, 5000])
        code, details = await code_of(backend.stub.Embedding(wrong))
    assert list(result.embeddings) == pytest.approx(list(text.embeddings), abs=1e-6)
    assert (code, details.partition(" is ")[0]) == (INVALID, "EmbeddingTokens: token id 5000")


async def test_an_encoder_generates_no_text_and_says_so(shared, encoders):
    directory = encoders["bert"]
    async with shared(directory) as backend:
        for call in (
            backend.stub.Predict(pb.PredictOptions(Prompt="la")),
            stream(backend.stub, pb.PredictOptions(Prompt="la")),
            backend.stub.Score(pb.ScoreRequest(prompt="la", candidates=["li"])),
            backend.stub.Rerank(pb.RerankRequest(query="la", documents=["li"])),
        ):
            code, details = await code_of(call)
            assert code is UNIMPLEMENTED
            assert details.endswith(f"{directory} is an encoder: it embeds")
        assert len((await embed(backend, "la")).embeddings) == 64


async def test_what_is_no_generation_works_with_an_encoder(encoders):
    async with served(encoders["bert"]) as backend:
        tokens = await backend.stub.TokenizeString(pb.PredictOptions(Prompt="la li"))
        text = await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=tokens.tokens))
        await embed(backend, TEXTS[1])
        metrics = await backend.stub.GetMetrics(pb.MetricsRequest())
        status = await backend.stub.Status(pb.HealthMessage())
        metadata = await backend.stub.ModelMetadata(pb.ModelOptions())
        assert (await backend.stub.Free(pb.HealthMessage())).success
    assert (tokens.length, text.content) == (2, "la li")
    assert metrics.prompt_tokens_processed == 32
    assert status.state == pb.StatusResponse.READY
    assert status.memory.breakdown["weights"] > 0
    assert not metadata.supports_thinking


@pytest.mark.parametrize("model_type", TYPES)
async def test_as_many_tokens_as_there_are_positions_fit(encoders, model_type):
    def request(count):
        return pb.PredictOptions(EmbeddingTokens=[40] * count)

    async with served(encoders[model_type], MaxModelLen=4096) as backend:
        longest = await backend.stub.Embedding(request(POSITIONS))
        code, details = await code_of(backend.stub.Embedding(request(POSITIONS + 1)))
    assert longest.prompt_tokens == POSITIONS
    assert code is INVALID
    assert "129 tokens do not fit: this model's maximum context length is 128 tokens" in details


async def test_a_length_that_is_no_number_is_refused_by_its_file(tmp_path):
    directory = build_encoder("bert", tmp_path / "m")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": "many"}')
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
    assert code is INVALID
    assert details.startswith("Model: ")
    assert "sentence_bert_config.json: max_seq_length is not a number" in details


async def test_a_checkpoint_says_how_long_its_texts_were(tmp_path):
    directory = build_encoder("bert", tmp_path / "m")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    ids = AutoTokenizer.from_pretrained(directory)(TEXTS[1]).input_ids
    async with served(directory, Options=["truncate:true"]) as backend:
        cut = await embed(backend, TEXTS[1])
        same = pb.PredictOptions(EmbeddingTokens=[*ids[:7], ids[-1]])
        expected = await backend.stub.Embedding(same)
    assert cut.prompt_tokens == 8
    assert list(cut.embeddings) == pytest.approx(list(expected.embeddings), abs=1e-6)
    async with served(directory, MaxModelLen=20) as backend:
        code, details = await code_of(embed(backend, TEXTS[1]))
    assert code is INVALID
    assert "do not fit: this model's maximum context length is 20 tokens" in details


def expected_relevance(directory, copy, query):
    from mlx_vlm.reranker_loader import load_sequence_classification_model

    network = load_sequence_classification_model(as_upstream_names_it(directory, copy))
    mend(network)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for document in DOCUMENTS:
        # As a list, which keeps an empty document.
        pair = {name: mx.array(ids) for name, ids in tokenizer([query], [document]).items()}
        yield 1 / (1 + np.exp(-network(**pair).logits.item())), pair["input_ids"].size


async def rerank(backend, **fields):
    return await backend.stub.Rerank(
        pb.RerankRequest(**{"query": "la li", "documents": DOCUMENTS} | fields)
    )


@pytest.mark.parametrize("model_type", TYPES)
async def test_a_cross_encoder_orders_documents(shared, cross_encoders, model_type, tmp_path):
    directory = cross_encoders[model_type]
    expected = list(expected_relevance(directory, tmp_path / "m", "la li"))
    async with shared(directory) as backend:
        result = await rerank(backend)
        best = await rerank(backend, top_n=2)
        alone = await rerank(backend, documents=DOCUMENTS[1:2])
    relevance = {each.index: each.relevance_score for each in result.results}
    assert [relevance[i] for i in range(6)] == pytest.approx([r for r, _ in expected], abs=1e-5)
    assert len({round(r, 4) for r, _ in expected}) == 6
    scores = [each.relevance_score for each in result.results]
    assert scores == sorted(scores, reverse=True)
    assert all(each.text == DOCUMENTS[each.index] for each in result.results)
    tokens = sum(count for _, count in expected)
    assert (result.usage.total_tokens, result.usage.prompt_tokens) == (tokens, tokens)
    assert [each.index for each in best.results] == [each.index for each in result.results[:2]]
    assert alone.results[0].relevance_score == pytest.approx(relevance[1], abs=1e-5)


async def test_equal_documents_have_one_score_in_the_order_of_the_call(cross_encoders):
    documents = ["la bo", *["du da di " * 8, "la bo", "be"] * 20]
    async with served(cross_encoders["bert"]) as backend:
        result = await rerank(backend, documents=documents)
        alone = [await rerank(backend, documents=[text]) for text in documents[:4]]
        computed = backend.engine.status().metrics["prompt_tokens"]
    scores = {text: [] for text in documents}
    for each in result.results:
        scores[each.text].append((each.relevance_score, each.index))
    for text, found in scores.items():
        assert len({score for score, _ in found}) == 1
        assert [index for _, index in found] == [
            index for index, document in enumerate(documents) if document == text
        ]
    counts = [each.usage.prompt_tokens for each in alone]
    assert result.usage.prompt_tokens == counts[0] + 20 * sum(counts[1:])
    assert computed == sum(counts) + sum(counts[1:])


async def test_a_cross_encoder_does_nothing_else_and_says_so(shared, cross_encoders):
    async with shared(cross_encoders["bert"]) as backend:
        for call in (
            backend.stub.Predict(pb.PredictOptions(Prompt="la")),
            backend.stub.Score(pb.ScoreRequest(prompt="la", candidates=["li"])),
            embed(backend, "la"),
        ):
            code, details = await code_of(call)
            assert code is UNIMPLEMENTED
            assert details.endswith("is a cross-encoder: it reranks")


async def test_a_document_that_is_too_long_is_refused_or_cut_at_its_end(cross_encoders):
    long = "so si " * 200
    async with served(cross_encoders["bert"]) as backend:
        code, details = await code_of(rerank(backend, documents=["la", long]))
        assert (code, details.partition(":")[0]) == (INVALID, "documents[1]")
        code, details = await code_of(rerank(backend, query=long))
        assert (code, details.partition(":")[0]) == (INVALID, "query")
    async with served(cross_encoders["bert"], Options=["truncate:true"]) as backend:
        result = await rerank(backend, documents=[long])
        same = await rerank(backend, documents=["so si " * 61 + "so"])
        code, details = await code_of(rerank(backend, query=long))
    assert result.usage.prompt_tokens == same.usage.prompt_tokens == POSITIONS
    assert result.results[0].relevance_score == same.results[0].relevance_score
    assert (code, details.partition(":")[0]) == (INVALID, "query")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "config.json asks for hidden_act 'relu', not 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "id2label": {"0": "no", "1": "yes"},
            },
            "into 2 classes",
        ),
    ],
)
async def test_what_an_encoder_asks_for_in_vain_fails_the_load(tmp_path, changes, reason):
    directory = build_encoder("bert", tmp_path / "m")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
    assert code is INVALID
    assert reason in details


async def test_a_dense_part_fails_the_load(tmp_path):
    directory = build_encoder("bert", tmp_path / "m")
    add_modules(directory, pooling="mean_tokens", parts=("Dense",))
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
    assert code is INVALID
    assert "unknown part: dense" in details


def test_without_mlx_vlm_an_encoder_says_what_to_install(encoders, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_vlm.encoder_loader", None)
    options = ModelOptions(model=str(encoders["bert"]))
    with pytest.raises(UnsupportedModelError) as caught:
        load(options, encoders["bert"])
    assert "mlx-vlm" in str(caught.value)
    assert CHECKOUT in str(caught.value)


async def test_a_decoder_takes_the_place_of_an_encoder(encoders, tiny_models):
    async with served(encoders["bert"]) as backend:
        await embed(backend, "la")
        await backend.load(tiny_models("llama"))
        reply = await backend.stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=2))
        await backend.load(encoders["bert"])
        assert reply.tokens
        assert len((await embed(backend, "la")).embeddings) == 64


def poisoned(directory, tensor, row=slice(None)):
    """Write NaN into a tensor of a checkpoint, the name of which ends as given."""
    path = directory / "model.safetensors"
    weights = mx.load(str(path))
    (name,) = [name for name in weights if name.endswith(tensor)]
    weights[name][row] = mx.nan
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    return directory


@pytest.mark.parametrize("build", [build_encoder, build_cross_encoder])
async def test_an_encoder_that_computes_no_numbers_is_refused(tmp_path, build):
    directory = poisoned(build("bert", tmp_path), "encoder.layer.0.output.dense.weight")
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
    assert (code, "NaN" in details) == (INVALID, True)


async def test_a_text_that_an_encoder_turns_into_nan_fails_alone(tmp_path):
    directory = build_encoder("bert", tmp_path)
    ids = AutoTokenizer.from_pretrained(directory)("9").input_ids
    poisoned(directory, "word_embeddings.weight", ids[1])
    async with served(directory) as backend:
        calls = [embed(backend, text) for text in ("la li", "9 li", "la lo")]
        good, bad, other = await asyncio.gather(*calls, return_exceptions=True)
    assert good.dim == other.dim == 64
    assert bad.code() is grpc.StatusCode.INTERNAL
    assert "NaN" in bad.details()


async def test_a_pair_that_a_cross_encoder_turns_into_nan_is_told(tmp_path):
    directory = build_cross_encoder("bert", tmp_path)
    ids = AutoTokenizer.from_pretrained(directory)("9").input_ids
    poisoned(directory, "word_embeddings.weight", ids[1])
    async with served(directory) as backend:
        request = pb.RerankRequest(query="la", documents=["li", "9"])
        code, details = await code_of(backend.stub.Rerank(request))
        assert (code, "NaN" in details) == (grpc.StatusCode.INTERNAL, True)
        assert (await backend.stub.Rerank(pb.RerankRequest(query="la", documents=["li"]))).results


def test_nothing_in_the_log_of_a_load_is_a_warning(encoders, tmp_path):
    with real_backend(tmp_path / "log") as backend:
        backend.load(encoders["bert"], Embeddings=True)
        backend.stub.Embedding(pb.PredictOptions(Embeddings="la li"), timeout=TIMEOUT_S)
        # By then a decoder would have prepared for grammars.
        time.sleep(WARM_UP_DELAY_S + 1)
        lines = backend.log_text.splitlines()
    assert len(lines) > 3
    assert not [line for line in lines if " WARNING " in line or "PyTorch" in line]
