"""The RPCs of the service: each parses its request, runs a pipeline and builds its reply."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from backend.config import (
    INLINE_MESSAGES,
    INLINE_REQUEST_BYTES,
    MAX_TOKEN_IDS,
    MODEL_WAIT_S,
    TRIMMED_REQUEST_BYTES,
    TuningOptions,
)
from backend.core.model import ModelKind
from backend.core.request import GenerationCall
from backend.core.step import Increment
from backend.errors import BackendError, ModelNotLoadedError, ModelReplacedError, WrongModelError
from backend.output.collect import Collector
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from backend.pipeline import worker_pool
from backend.pipeline.decisions import decide
from backend.pipeline.entities import classify
from backend.pipeline.generate import detokenize, generate, tell_format, tokenize
from backend.pipeline.scores import embed, rerank, score
from backend.pipeline.served_model import ServedEngine, ServedModel
from backend.pipeline.transcribe import transcribe
from backend.rpc.host_rules import HostsReply, is_load_for_jobs, ruling_named, unmet_wishes
from backend.rpc.job_servicer import JobServicer
from backend.rpc.parsing.checks import require_at_most
from backend.rpc.parsing.generation_fields import generation_call, prompt_part
from backend.rpc.parsing.load_options import model_named, model_options
from backend.rpc.parsing.scoring_fields import (
    classify_call,
    classify_response,
    decision_response,
    embedding_call,
    embedding_result,
    rerank_call,
    rerank_result,
    score_call,
    score_pieces,
    transcript_result,
    transcription_call,
)
from backend.rpc.replies import completion_reply, increment_reply, token_response
from backend.rpc.reports import metadata_response, metrics_response, status_response
from common.log import shortened
from common.machine_memory import Heap
from common.process import in_own_thread
from common.rpc import Context, identity_mismatch, present_request_bytes

# ruff: noqa: N802 - the methods have the names of the RPCs

log = logging.getLogger(__name__)

Call = TypeVar("Call")
Answer = TypeVar("Answer")


class BackendServicer(JobServicer, backend_pb2_grpc.BackendServicer):
    """Answers the host. Errors leave as exceptions: `StatusInterceptor` translates them."""

    def __init__(
        self,
        engine: ServedEngine,
        defaults: TuningOptions,
        download_environment: Mapping[str, str],
    ) -> None:
        super().__init__(download_environment)
        self._engine = engine
        self._defaults = defaults
        self._heap = Heap()

    async def LoadModel(self, request: pb.ModelOptions, _context: Context) -> pb.Result:
        """Load a model; a caller that leaves cancels the load."""
        name = request.Model or request.ModelFile
        with self._clearing_up(), model_named(request), _failure_logged(name):
            options = model_options(request, self._defaults)
            self.models_dir = str(options.models_dir or "")
            if await in_own_thread(is_load_for_jobs, options):
                await self._engine.free()
                return pb.Result(success=True, message="no model is loaded: ready for jobs")
            card = await self._engine.load(options)
        for wish in unmet_wishes(request, card, options):
            log.warning("%s", wish)
        if (model := self._engine.model) is not None:
            tell_format(model)
        return pb.Result(success=True, message=f"loaded {card.name} ({card.model_type})")

    async def Free(self, _request: pb.HealthMessage, _context: Context) -> pb.Result:
        """Drop the model and end its requests."""
        with self._clearing_up():
            await self._engine.free()
        return pb.Result(success=True, message="freed")

    async def Predict(self, request: pb.PredictOptions, _context: Context) -> pb.Reply:
        """Answer with the fold of the stream."""
        collector = Collector()
        with ruling_named(request):
            async with aclosing(self._increments(request)) as increments:
                async for increment in increments:
                    collector.add(increment)
        completion = collector.completion
        return HostsReply(request).settle(completion_reply(completion), completion.finish)

    async def PredictStream(self, request: pb.PredictOptions, context: Context) -> None:
        """Send a reply for each increment that is not empty."""
        hosts = HostsReply(request)
        with ruling_named(request):
            async with aclosing(self._increments(request)) as increments:
                async for increment in increments:
                    reply = hosts.settle(increment_reply(increment), increment.finish)
                    if reply.chat_deltas or increment.finish:
                        await context.write(reply)

    async def TokenizeString(self, request: pb.PredictOptions, _context: Context) -> bytes:
        """Answer with the ids of a text, or of a rendered conversation."""
        model = await self._model(request)
        if not (request.Prompt or request.Messages or request.UseTokenizerTemplate):
            return await token_response([])
        token_ids = await tokenize(await self._call(request, model, prompt_part), model)
        return await token_response(token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, _context: Context
    ) -> pb.DetokenizeResponse:
        """Answer with the text of ids."""
        require_at_most("tokens", request.tokens, MAX_TOKEN_IDS)
        return pb.DetokenizeResponse(
            content=await detokenize(request.tokens, await self._model(request))
        )

    async def Status(self, _request: pb.HealthMessage, _context: Context) -> pb.StatusResponse:
        """Answer with state and memory."""
        return status_response(self._engine.status())

    async def GetMetrics(
        self, _request: pb.MetricsRequest, _context: Context
    ) -> pb.MetricsResponse:
        """Answer with the engine's counters."""
        return metrics_response(self._engine.status())

    async def ModelMetadata(
        self, request: pb.ModelOptions, _context: Context
    ) -> pb.ModelMetadataResponse:
        """Answer with the abilities of the loaded model."""
        return await metadata_response(await self._model(request))

    async def Embedding(self, request: pb.PredictOptions, _context: Context) -> pb.EmbeddingResult:
        """Answer with the vector of a text, or of each of its tokens."""
        call = await _parsed(partial(embedding_call, request))
        found = await self._computed(request, lambda model: embed(call, model, self._engine))
        return embedding_result(found)

    async def Score(self, request: pb.ScoreRequest, _context: Context) -> pb.ScoreResponse | bytes:
        """Answer with the log-probabilities of candidates."""
        call = await _parsed(partial(score_call, request))

        async def answer(model: ServedModel) -> pb.ScoreResponse | bytes:
            if call.question_type or model.card.kind is ModelKind.DECIDER:
                return decision_response(await decide(call, model, self._engine), request)
            pieces = score_pieces(await score(call, model, self._engine), request)
            return b"".join(await worker_pool.run_in_turns(pieces, size_bytes=0))

        return await self._computed(request, answer)

    async def Rerank(self, request: pb.RerankRequest, _context: Context) -> pb.RerankResult:
        """Answer with documents sorted by relevance."""
        call = await _parsed(partial(rerank_call, request))
        found = await self._computed(request, lambda model: rerank(call, model, self._engine))
        return rerank_result(found)

    async def TokenClassify(
        self, request: pb.TokenClassifyRequest, _context: Context
    ) -> pb.TokenClassifyResponse:
        """Answer with the entities of a text."""
        call = await _parsed(partial(classify_call, request))
        found = await self._computed(request, lambda model: classify(call, model, self._engine))
        return classify_response(found)

    async def AudioTranscription(
        self, request: pb.TranscriptRequest, _context: Context
    ) -> pb.TranscriptResult:
        """Answer with the words of a recording."""
        parts = transcribe(transcription_call(request), await self._model(request), self._engine)
        result = pb.TranscriptResult()
        async with aclosing(parts):
            async for part in parts:
                if not isinstance(part, str):
                    result = transcript_result(part)
        return result

    async def AudioTranscriptionStream(
        self, request: pb.TranscriptRequest, context: Context
    ) -> None:
        """Send the words of a recording as they are recognised, and the full result last."""
        parts = transcribe(transcription_call(request), await self._model(request), self._engine)
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, str):
                    await context.write(pb.TranscriptStreamResponse(delta=part))
                else:
                    result = transcript_result(part)
                    await context.write(pb.TranscriptStreamResponse(final_result=result))

    @contextmanager
    def _clearing_up(self) -> Iterator[None]:
        """Give back the memory of a model that has gone, and the free memory that a load leaves."""
        before = self._engine.model
        try:
            yield
        finally:
            if before is None or before is not self._engine.model:
                self._heap.trim_soon()
            if before is not None and before is not self._engine.model:
                worker_pool.renew_threads()

    async def _model(self, request: Message) -> ServedModel:
        """Return the loaded model; while one is being loaded, wait for it.

        Raises:
            ModelNotLoadedError: There is none.
            WrongModelError: It is another than the request names: the load may have begun after
                the name was compared.
        """
        if (model := await self._engine.loaded_model(MODEL_WAIT_S)) is None:
            raise ModelNotLoadedError
        if problem := identity_mismatch(request, model.options.model):
            raise WrongModelError(problem)
        return model

    async def _computed(
        self, request: Message, answer: Callable[[ServedModel], Awaitable[Answer]]
    ) -> Answer:
        """Return the answer of the loaded model, or of the one that replaces it meanwhile."""
        while True:
            model = await self._model(request)
            try:
                return await answer(model)
            except ModelReplacedError:
                log.info("the request of a replaced model is computed by the next one")

    async def _increments(self, request: pb.PredictOptions) -> AsyncGenerator[Increment, None]:
        """Yield a reply of the loaded model; one that another load ends before it begins, anew."""
        has_begun = False
        while True:
            model = await self._model(request)
            try:
                call = await self._call(request, model)
                async with aclosing(generate(call, model, self._engine)) as increments:
                    async for increment in increments:
                        has_begun = True
                        yield increment
            except ModelReplacedError:
                if has_begun:
                    raise
                log.info("request %s waits for the model that replaces its own", call.request_id)
            else:
                return

    async def _call(
        self,
        request: pb.PredictOptions,
        model: ServedModel,
        part: Callable[[pb.PredictOptions], pb.PredictOptions] = lambda request: request,
    ) -> GenerationCall:
        size_bytes = present_request_bytes()
        # A picture of few bytes may have many pixels.
        is_large = size_bytes > TRIMMED_REQUEST_BYTES or request.Images or request.Videos
        if is_large and (task := asyncio.current_task()):
            task.add_done_callback(lambda _: self._heap.trim_soon())

        def parse() -> GenerationCall:
            return generation_call(part(request), model.options, size_bytes)

        return await _parsed(parse, takes_long=len(request.Messages) > INLINE_MESSAGES)


async def _parsed(parse: Callable[[], Call], *, takes_long: bool = False) -> Call:
    """Return the call that the present request becomes; the loop answers others meanwhile."""
    size_bytes = present_request_bytes()
    if size_bytes <= INLINE_REQUEST_BYTES and not takes_long:
        return parse()
    return await worker_pool.run(parse, size_bytes=size_bytes)


@contextmanager
def _failure_logged(model: str) -> Iterator[None]:
    """Log why a model cannot be loaded: some hosts show no reason."""
    try:
        yield
    except BackendError as error:
        log.warning("LoadModel of %s failed: %s", shortened(model), shortened(str(error)))
        raise
