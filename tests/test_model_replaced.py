"""A model is replaced while a request for it is prepared: its tokens never reach the other one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

import pytest
from scripted_engine import ByteTokenizer, ScriptedEngine, make_model, served, steps, stub
from serving import code_of

from backend.config import INLINE_REQUEST_BYTES
from backend.core.embedding import Embedding, EmbeddingCall
from backend.core.model import ModelKind
from backend.core.request import GenerationCall
from backend.core.scoring import RerankCall, RerankerKind, ScoreCall
from backend.embedding import embed
from backend.errors import RequestCancelledError
from backend.generation import generate
from backend.pb import backend_pb2 as pb
from backend.reranking import rerank
from backend.scoring import score


class WordTokenizer(ByteTokenizer):
    """Knows the answers of a reranker, and reads pairs."""

    def encode(self, text, **_options):
        return [1] if text in ("yes", "no") else super().encode(text)

    def encode_pair(self, query, document, **_options):
        token_ids = self.encode(query + document)
        return token_ids, [0] * len(token_ids)


class ReplacingTokenizer(WordTokenizer):
    """Another model is loaded as soon as a text is read."""

    def __init__(self, engine):
        super().__init__()
        self._engine = engine

    def encode(self, text, **_options):
        self._engine.replace_model()
        return super().encode(text)

    encode_prompt = encode


class Engine(ScriptedEngine):
    """Notes what comes; its model may be replaced at any time."""

    def __init__(self):
        super().__init__(steps("ab"))
        self.given = []

    def replace_model(self):
        self.model = make_model("org/other")

    def submit(self, request):
        self.given.append(request)
        return super().submit(request)

    async def embed(self, request):
        self.given.append(request)
        return Embedding(values=[1.0], dim=1, is_pooled=True, prompt_tokens=1)

    async def score(self, request):
        self.given.append(request)
        return tuple((0.0,) * len(tokens) for tokens in request.continuations)

    async def judge(self, request):
        self.given.append(request)
        return (0.0,) * len(request.pairs)


async def predict(engine):
    call = GenerationCall(request_id="r", prompt="la")
    async with aclosing(generate(call, engine)) as increments:
        return [increment async for increment in increments]


async def embedding(engine):
    return await embed(EmbeddingCall(text="la"), engine)


async def scores(engine):
    return await score(ScoreCall(prompt="la", candidates=("li", "lo")), engine)


async def ranking(engine):
    return await rerank(RerankCall(query="la", documents=("li", "lo"), max_results=None), engine)


def engine_with(tokenizer_of, **card):
    engine = Engine()
    tokenizer = tokenizer_of(engine)
    engine.model = replace(
        engine.model, tokenizer=tokenizer, card=replace(engine.model.card, **card)
    )
    return engine


CALLS = [
    (predict, {}),
    (embedding, {}),
    (scores, {}),
    (ranking, {"reranker": RerankerKind.QWEN3}),
    (ranking, {"kind": ModelKind.CROSS_ENCODER}),
]


@pytest.mark.parametrize(("call", "card"), CALLS)
async def test_what_was_prepared_for_another_model_is_not_computed(call, card):
    engine = engine_with(lambda _: WordTokenizer(), **card)
    assert await call(engine)
    assert engine.given
    replaced = engine_with(ReplacingTokenizer, **card)
    with pytest.raises(RequestCancelledError, match="another model"):
        await call(replaced)
    assert not replaced.given


async def test_a_ranking_ends_when_the_model_is_replaced_between_its_documents():
    engine = engine_with(lambda _: WordTokenizer(), reranker=RerankerKind.QWEN3)
    score_one = engine.score

    async def score_and_replace(request):
        scored = await score_one(request)
        if request.continuations:
            engine.replace_model()
        return scored

    engine.score = score_and_replace
    with pytest.raises(RequestCancelledError):
        await ranking(engine)
    assert len([request for request in engine.given if request.continuations]) == 1


class ReplacingExecutor(ThreadPoolExecutor):
    """Another model is loaded as soon as the first work is handed to a thread."""

    def __init__(self, engine):
        super().__init__(1)
        self._engine = engine
        self._has_replaced = False

    def submit(self, *work, **arguments):
        if not self._has_replaced:
            self._has_replaced = True
            self._engine.model = make_model("org/other")
        return super().submit(*work, **arguments)


async def test_a_large_request_is_not_read_by_the_options_of_another_model():
    engine = ScriptedEngine(steps("ab"))
    async with served(engine) as channel:
        asyncio.get_running_loop().set_default_executor(ReplacingExecutor(engine))
        request = pb.PredictOptions(Prompt="a", NegativePrompt="a" * INLINE_REQUEST_BYTES)
        code, details = await code_of(stub(channel).Predict(request))
    assert (code.name, engine.requests) == ("ABORTED", [])
    assert details.startswith("another model")
