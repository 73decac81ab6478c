"""Score and Rerank through the socket: equal to a direct computation with the same model."""

import asyncio
import math

import grpc
import mlx.core as mx
import pytest
from serving import code_of, require_others_pass_and_leaving_ends, served, stream
from transformers import AutoTokenizer
from waiting import until

from backend.pb import backend_pb2 as pb
from scripts.tiny_retrieval import build_reranker

pytestmark = pytest.mark.mlx

PROMPT = "You help. " + "be bi ba bo du " * 12 + "is it"
CANDIDATES = [" da", " bo bu bi", "bo" * 30, "!"]
FAMILIES = ["llama", "llama_sliding", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2"]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def encoder(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def logprobs(network, token_ids):
    """Log-probabilities of all tokens but the first, in one pass."""
    logits = network(mx.array([token_ids]))[0, :-1].astype(mx.float32)
    rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(rows, mx.array(token_ids[1:])[:, None], axis=-1)[:, 0].tolist()


def expected_logprobs(network, encode, prompt, candidate):
    """Those of a candidate, from where the tokens leave the prompt's."""
    alone, whole = encode(prompt), encode(prompt + candidate)
    start = next((i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), None)
    return logprobs(network, whole)[(len(alone) if start is None else start) - 1 :]


async def score(backend, prompt=PROMPT, candidates=CANDIDATES, **fields):
    request = pb.ScoreRequest(prompt=prompt, candidates=candidates, **fields)
    return (await backend.stub.Score(request)).candidates


@pytest.mark.parametrize("family", FAMILIES)
async def test_candidates_score_as_in_one_pass(tiny_models, networks, family):
    encode = encoder(tiny_models(family))
    async with served(tiny_models(family), Options=["prefill_chunk:16"]) as backend:
        cold = await score(backend, include_token_logprobs=True)
        warm = await score(backend, include_token_logprobs=True)
    for candidate, first, second in zip(CANDIDATES, cold, warm, strict=True):
        expected = expected_logprobs(networks(family), encode, PROMPT, candidate)
        for scored in (first, second):
            assert [t.log_prob for t in scored.tokens] == pytest.approx(expected, abs=1e-3)
            assert scored.log_prob == pytest.approx(sum(expected), abs=1e-2)
            assert scored.num_tokens == len(expected)
        assert "".join(token.token for token in first.tokens).endswith(candidate.strip())


@pytest.mark.smoke
async def test_tokens_that_merge_with_the_prompt_are_scored(shared, tiny_models, networks):
    encode = encoder(tiny_models("llama"))
    prompt, candidate = "du !a", "bo"  # "ab" is one token
    assert encode(prompt)[-1] not in encode(prompt + candidate)
    async with shared(tiny_models("llama")) as backend:
        merged, plain = await score(backend, prompt, [candidate, "! bo"])
    network = networks("llama")
    for scored, text in ((merged, candidate), (plain, "! bo")):
        expected = expected_logprobs(network, encode, prompt, text)
        assert scored.num_tokens == len(expected)
        assert scored.log_prob == pytest.approx(sum(expected), abs=1e-3)


async def test_details_come_on_request(tiny_models):
    async with served(tiny_models("llama")) as backend:
        (plain,) = await score(backend, candidates=[" bo bu"])
        (full,) = await score(
            backend, candidates=[" bo bu"], include_token_logprobs=True, length_normalize=True
        )
    assert (len(plain.tokens), plain.length_normalized_log_prob) == (0, 0.0)
    assert len(full.tokens) == full.num_tokens == plain.num_tokens
    mean = full.log_prob / full.num_tokens
    assert full.length_normalized_log_prob == pytest.approx(mean)


async def test_the_prompt_is_computed_once(tiny_models):
    async with served(tiny_models("llama")) as backend:
        await score(backend)
        tokens = encoder(tiny_models("llama"))(PROMPT)
        first = backend.engine.status().metrics
        await score(backend)
        second = backend.engine.status().metrics
    assert first["prompt_cache.hit_tokens"] == 0
    assert second["prompt_cache.hit_tokens"] == len(tokens) - 1


async def test_a_recurrent_model_goes_on_from_the_stable_prefix(tiny_models):
    head = "You help. " + "be bi ba bo du " * 12
    async with served(tiny_models("mamba2")) as backend:
        stable = len(encoder(tiny_models("mamba2"))(head))
        for question in ("is it", "what now"):
            await score(backend, head + question, stable_prefix_len=len(head.encode()))
        assert backend.engine.status().metrics["prompt_cache.hit_tokens"] >= stable - 1


async def test_short_scores_pass_a_long_one_which_ends_when_its_caller_leaves(tiny_models):
    async with served(tiny_models("llama"), MaxModelLen=4096) as backend:
        long = [f"{'bo bu ' * 80}{number}" for number in range(1024)]
        await require_others_pass_and_leaving_ends(
            backend,
            lambda: score(backend, "ba", [" bi bo", " bu"]),
            lambda: score(backend, PROMPT, long),
        )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": "ba"}, "candidates: is empty"),
        ({"prompt": "ba", "candidates": ["bo", ""]}, "candidates[1]: is empty"),
        ({"candidates": ["bo"]}, "prompt: is empty"),
        ({"prompt": "ba", "candidates": ["bo "] * 1025}, "candidates: holds 1025 values"),
        ({"prompt": "ba", "candidates": ["bo " * 99]}, "candidates[0]: "),
        ({"prompt": "ba " * 99, "candidates": ["bo"]}, "prompt: "),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(shared, tiny_models, fields, problem):
    async with shared(tiny_models("llama"), MaxModelLen=64) as backend:
        code, details = await code_of(backend.stub.Score(pb.ScoreRequest(**fields)))
    assert code is INVALID
    assert details.startswith(problem)


async def test_scores_beside_streams_change_no_token(tiny_models):
    asked = [pb.PredictOptions(Prompt=p, Tokens=30, IgnoreEOS=True) for p in ("ba bi", "du da")]
    async with served(tiny_models("gemma3_text"), Options=["prefill_chunk:16"]) as backend:
        alone = [(await stream(backend.stub, request)).message for request in asked]
        single = [each.log_prob for each in await score(backend)]
        replies = asyncio.gather(*(stream(backend.stub, request) for request in asked))
        together = await asyncio.gather(*(score(backend) for _ in range(6)))
        assert [reply.message for reply in await replies] == alone
    for scored in together:
        assert [each.log_prob for each in scored] == pytest.approx(single, abs=1e-3)


DOCUMENTS = ["ba bo", "du da di " * 8, "is it", "ba bo bi", "be"]
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
    'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
BODY = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: what\n<Document>: {}"
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return build_reranker(tmp_path_factory.mktemp("models") / "tiny-qwen3-Reranker")


def expected_relevance(directory):
    from backend.model.checkpoint.upstream import import_mlx_lm

    network = import_mlx_lm().load_model(directory)[0]
    encode = encoder(directory)
    for document in DOCUMENTS:
        ids = encode(HEAD) + encode(BODY.format(document)) + encode(TAIL)
        last = network(mx.array([ids]))[0, -1]
        yes, no = last[encode("yes")[0]].item(), last[encode("no")[0]].item()
        yield math.exp(yes) / (math.exp(yes) + math.exp(no)), len(ids)


async def rerank(backend, **fields):
    return await backend.stub.Rerank(
        pb.RerankRequest(**{"query": "what", "documents": DOCUMENTS} | fields)
    )


@pytest.mark.smoke
async def test_a_reranker_orders_documents_by_yes_against_no(shared, reranker):
    expected = list(expected_relevance(reranker))
    async with shared(reranker) as backend:
        result = await rerank(backend)
        best = await rerank(backend, top_n=2)
    relevance = {each.index: each.relevance_score for each in result.results}
    assert [relevance[i] for i in range(5)] == pytest.approx([r for r, _ in expected], abs=1e-4)
    scores = [each.relevance_score for each in result.results]
    assert scores == sorted(scores, reverse=True)
    assert all(each.text == DOCUMENTS[each.index] for each in result.results)
    tokens = sum(count for _, count in expected)
    assert (result.usage.total_tokens, result.usage.prompt_tokens) == (tokens, tokens)
    assert [each.index for each in best.results] == [each.index for each in result.results[:2]]


async def test_a_query_is_computed_once_for_all_documents(reranker):
    async with served(reranker) as backend:
        await rerank(backend)
        books = backend.engine.status().metrics
        head = len(encoder(reranker)(HEAD))
        assert books["prompt_cache.hit_tokens"] >= len(DOCUMENTS) * head
        assert (
            books["prompt_cache.tokens"]
            < books["prompt_cache.looked_up_tokens"] - books["prompt_cache.hit_tokens"]
        )


async def test_another_model_reranks_only_if_the_option_says_so(tiny_models):
    async with served(tiny_models("llama")) as backend:
        code, details = await code_of(rerank(backend))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "is not known as a reranker" in details
    async with served(tiny_models("llama"), Options=["reranker:qwen3"]) as backend:
        code, details = await code_of(rerank(backend))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details == "Rerank: yes and no are not single tokens of this model"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"query": ""}, "query: is empty"),
        ({"documents": []}, "documents: is empty"),
        ({"top_n": -1}, "top_n: must be at least 0, not -1"),
        ({"documents": ["ba", "ba " * 999]}, "documents[1]: "),
        ({"query": "ba " * 999}, "query: "),
        ({"query": "ba " * 9999}, "query: "),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(shared, reranker, fields, problem):
    async with shared(reranker, MaxModelLen=600) as backend:
        code, details = await code_of(rerank(backend, **fields))
    assert code is INVALID
    assert details.startswith(problem)


async def test_with_truncate_a_long_document_is_cut_before_the_tail(shared, reranker):
    options = {"MaxModelLen": 600, "Options": ["truncate:true"]}
    async with shared(reranker, **options) as backend:
        result = await rerank(backend, documents=["ba " * 999])
    assert result.usage.prompt_tokens == 600


async def test_with_truncate_a_query_that_leaves_no_room_is_refused(shared, reranker):
    options = {"MaxModelLen": 600, "Options": ["truncate:true"]}
    async with shared(reranker, **options) as backend:
        code, details = await code_of(rerank(backend, query="ba " * 400))
    assert code is INVALID
    assert details.startswith("query: ")


@pytest.mark.parametrize("rpc", ["Score", "Rerank"])
async def test_a_thousand_texts_of_each_caller_leave_threads_to_others(tmp_path, rpc):
    """Each call is refused for its last text, so that it ends with the reading of all."""
    texts = ["ba be bi " * 50] * 1023 + ["ba be bi " * 4000]
    async with served(build_reranker(tmp_path), Options=["reranker:qwen3"]) as backend:
        stub = backend.stub
        calls = {
            "Score": lambda: stub.Score(pb.ScoreRequest(prompt="ba", candidates=texts)),
            "Rerank": lambda: stub.Rerank(pb.RerankRequest(query="ba", documents=texts)),
        }
        refusals = [asyncio.ensure_future(code_of(calls[rpc]())) for _ in range(8)]
        # The first may come before them.
        for _ in range(3):
            await stub.TokenizeString(pb.PredictOptions(Prompt="ba be " * 10_000))
        assert not [each for each in refusals if each.done()]
        for code, details in await asyncio.gather(*refusals):
            assert (code, "[1023]: " in details) == (INVALID, True), details


async def test_a_short_score_does_not_wait_for_all_the_long_ones(tiny_models):
    async with served(tiny_models("llama")) as backend:
        long = ["ba be bi " * 20] * 64
        others = [asyncio.ensure_future(score(backend, candidates=long)) for _ in range(8)]
        await until(lambda: backend.engine.calls.background_jobs == len(others))
        await score(backend, candidates=[" da"])
        assert sum(each.done() for each in others) < len(others) / 2
        for each in others:
            each.cancel()
