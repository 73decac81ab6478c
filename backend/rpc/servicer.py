"""The RPCs of the service: each parses its request, asks the pipeline, and builds its reply."""
# ruff: noqa: N802 - the methods have the names of the RPCs

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from backend.config import INLINE_REQUEST_BYTES, MAX_TOKEN_IDS, ModelOptions, TuningOptions
from backend.core.model import ModelCard
from backend.core.request import GenerationCall
from backend.core.status import EngineStatus
from backend.embedding import embed
from backend.errors import EngineDownError, ModelNotLoadedError
from backend.generation import TextEngine, detokenize, generate, tokenize, warm_up
from backend.intake import SideEngine, require_same
from backend.output.collect import Collector
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.reranking import rerank
from backend.rpc.embedding import embedding_call, embedding_result
from backend.rpc.limits import require_at_most
from backend.rpc.model_options import model_options
from backend.rpc.replies import completion_reply, increment_reply
from backend.rpc.reports import metadata_response, metrics_response, status_response
from backend.rpc.requests import generation_call, prompt_part
from backend.rpc.scoring import rerank_call, rerank_result, score_call, score_response
from backend.scoring import score
from common.handlers import Context
from common.heap import Heap

log = logging.getLogger(__name__)


class ServedEngine(TextEngine, SideEngine, Protocol):
    """What the service needs of an engine beyond the pipelines' needs."""

    async def load(self, options: ModelOptions) -> ModelCard:
        """Load a model in place of the one before; to cancel is to give the load up."""

    async def free(self) -> None:
        """End what runs and drop the model."""

    @property
    def fault(self) -> str:
        """Why nothing can be served any more; empty while something can."""

    def on_fault(self, listener: Callable[[], None]) -> None:
        """Have one listener called, on the event loop, when `fault` has changed."""

    def status(self) -> EngineStatus:
        """Return a snapshot, at once; from any thread."""

    async def close(self, *, drain_timeout_s: float) -> None:
        """Refuse new work, let the running finish up to the timeout, then end."""


class BackendServicer(backend_pb2_grpc.BackendServicer):
    """Answers the host. Errors leave as exceptions: `StatusInterceptor` translates them."""

    def __init__(self, engine: ServedEngine, defaults: TuningOptions) -> None:
        """Prepare.

        Args:
            engine: What computes.
            defaults: Options of models that are loaded without them.
        """
        self._engine = engine
        self._defaults = defaults
        self._heap = Heap()

    async def Health(self, _request: pb.HealthMessage, _context: Context) -> pb.Reply:
        """Answer at all times, whatever the engine does; OK unless it is beyond repair."""
        if self._engine.fault:
            raise EngineDownError(self._engine.fault)
        return pb.Reply(message=b"OK")

    async def LoadModel(self, request: pb.ModelOptions, _context: Context) -> pb.Result:
        """Load a model; a caller that leaves cancels the load."""
        card = await self._engine.load(model_options(request, self._defaults))
        # Reading a vocabulary for grammars holds Python's lock: better now than beside a stream.
        await warm_up(self._engine)
        return pb.Result(success=True, message=f"loaded {card.name} ({card.model_type})")

    async def Free(self, _request: pb.HealthMessage, _context: Context) -> pb.Result:
        """Drop the model, and with it whatever runs."""
        await self._engine.free()
        self._heap.trim_soon()
        return pb.Result(success=True, message="freed")

    async def Predict(self, request: pb.PredictOptions, _context: Context) -> pb.Reply:
        """Answer with the fold of the stream."""
        collector = Collector()
        async with aclosing(generate(await self._call(request), self._engine)) as increments:
            async for increment in increments:
                collector.add(increment)
        return completion_reply(collector.completion)

    async def PredictStream(self, request: pb.PredictOptions, context: Context) -> None:
        """Send a reply for each increment that carries something."""
        async with aclosing(generate(await self._call(request), self._engine)) as increments:
            async for increment in increments:
                reply = increment_reply(increment)
                if reply.chat_deltas or increment.finish is not None:
                    await context.write(reply)

    async def TokenizeString(
        self, request: pb.PredictOptions, _context: Context
    ) -> pb.TokenizationResponse:
        """Answer with the ids of a text, or of a rendered conversation."""
        token_ids = await tokenize(await self._call(prompt_part(request)), self._engine)
        return pb.TokenizationResponse(length=len(token_ids), tokens=token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, _context: Context
    ) -> pb.DetokenizeResponse:
        """Answer with the text of ids."""
        require_at_most("tokens", request.tokens, MAX_TOKEN_IDS)
        return pb.DetokenizeResponse(content=await detokenize(request.tokens, self._engine))

    async def Status(self, _request: pb.HealthMessage, _context: Context) -> pb.StatusResponse:
        """Answer with state and memory."""
        return status_response(self._engine.status())

    async def GetMetrics(
        self, _request: pb.MetricsRequest, _context: Context
    ) -> pb.MetricsResponse:
        """Answer with the engine's counters."""
        return metrics_response(self._engine.status())

    async def ModelMetadata(
        self, _request: pb.ModelOptions, _context: Context
    ) -> pb.ModelMetadataResponse:
        """Answer with what was found out about the loaded model."""
        return await metadata_response(self._engine)

    async def Embedding(self, request: pb.PredictOptions, _context: Context) -> pb.EmbeddingResult:
        """Answer with the vector of a text, or of each of its tokens."""
        return embedding_result(await embed(embedding_call(request), self._engine))

    async def Score(self, request: pb.ScoreRequest, _context: Context) -> pb.ScoreResponse:
        """Answer with the log-probabilities of candidates."""
        return score_response(await score(score_call(request), self._engine), request)

    async def Rerank(self, request: pb.RerankRequest, _context: Context) -> pb.RerankResult:
        """Answer with documents in the order of their relevance."""
        return rerank_result(await rerank(rerank_call(request), self._engine))

    async def _call(self, request: pb.PredictOptions) -> GenerationCall:
        model, options = self._engine.model, self._engine.options
        if model is None or options is None:
            raise ModelNotLoadedError
        if request.ByteSize() <= INLINE_REQUEST_BYTES:
            return generation_call(request, options)
        if task := asyncio.current_task():
            task.add_done_callback(lambda _: self._heap.trim_soon())
        # Megabytes of JSON take a while to read: others are answered meanwhile.
        call = await asyncio.to_thread(generation_call, request, options)
        require_same(model, self._engine.model)
        return call
