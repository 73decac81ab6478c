"""An engine that plays back given events, and a server around it: no model, no MLX."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import grpc.aio
from engine_events import steps_of

from backend.config import ModelOptions, ServerConfig
from backend.core.engine_status import (
    BackendStatus,
    EngineState,
    EngineStatus,
    MachineStatus,
    ProcessStatus,
    RequestPhase,
    RequestStatus,
    Restart,
)
from backend.core.metric_table import zeros
from backend.core.model import ModelCard
from backend.core.prefix_listing import HitKind
from backend.core.request import GenerationRequest
from backend.core.step import EngineEvent, FinishReason, PrefillDone, StepLogprobs, Steps, TokenStep
from backend.errors import BackendError
from backend.model.loaded import LoadedModel
from backend.model.text.template import ChatTemplate
from backend.pb import backend_pb2_grpc
from backend.pipeline.served_model import ServedEngine, ServedModel
from backend.rpc.server import BackendServer
from backend.rpc.services import Services

EOS = 0
TIMEOUT_S = 30.0


STATUS = EngineStatus(
    memory_bytes={"weights": 5, "mlx_active": 7, "mlx_cache": 3},
    processes=(
        ProcessStatus(role="server", process_id=21, resident_bytes=2**26),
        ProcessStatus(role="engine", process_id=22, resident_bytes=2**28),
    ),
    latest_restarts=(Restart(reason="it was ended by SIGKILL", lost_s=2.5),),
    machine=MachineStatus(
        usable_bytes=2**36,
        backends=(
            BackendStatus(
                process_id=22,
                model="org/tiny",
                held_bytes=2**34,
                reserved_bytes=2**33,
                wanted_bytes=2**32,
                cached_bytes=2**31,
                budget_bytes=2**35,
                is_busy=True,
                is_own=True,
            ),
        ),
    ),
    metrics=zeros()
    | {
        "slots_taken": 1,
        "prompt_tokens": 11,
        "generated_tokens": 13,
        "tokens_per_s": 1.5,
        "turn_s": 1.5,
        "restarts": 1,
        "lost_s": 2.5,
        "prompt_cache.bytes": 2**33,
        "prompt_cache.budget_bytes": 2**34,
        "prompt_cache.nodes": 3,
        "prompt_cache.tokens": 40,
        "prompt_cache.looked_up_tokens": 50,
        "prompt_cache.hit_tokens": 20,
        "prompt_cache.hits.miss": 2,
        "prompt_cache.hits.exact": 1,
        "prompt_cache.evictions": 4,
        "prompt_cache.disk.bytes": 2**35,
        "prompt_cache.disk.files": 6,
        "prompt_cache.disk.read_tokens": 70,
        "prompt_cache.disk.written_bytes": 700,
        "prompt_cache.disk.damaged": 8,
        "prompt_cache.disk.dropped": 9,
    },
    requests=(
        RequestStatus(
            request_id="a",
            phase=RequestPhase.PREFILLING,
            prompt_tokens=30,
            prefilled_tokens=20,
            cached_tokens=10,
            hit_kind=HitKind.SHORTER,
            generated_tokens=0,
            first_token_ms=0.0,
            tokens_per_s=0.0,
            kv_bytes=2**34,
            kv_shared_bytes=2**33,
        ),
    ),
)


class ByteTokenizer:
    """A token is a byte, and its id the byte's value."""

    trims_leading_space = False
    longest_piece_bytes = 1
    normalized = None

    def __init__(self) -> None:
        self.vocabulary = {chr(number): number for number in range(256)}
        self.pieces = tuple(bytes([number]) for number in range(256))
        self.special_texts: dict[int, str] = {}
        self.added_texts: dict[int, str] = {}

    def encode(self, text: str, **_options: bool) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_packed(self, text: str, **options: bool) -> list[int]:
        return self.encode(text, **options)

    def encode_prompt_packed(self, text: str) -> list[int]:
        return self.encode_prompt(text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def visible_pieces(self, _markers: Any) -> Sequence[bytes]:
        return self.pieces


def steps(text: str, reason: FinishReason = FinishReason.STOP) -> list[EngineEvent]:
    """Return the events of a reply: a token per byte, then the stop token, or the last byte."""
    tokens = [TokenStep(byte, logprobs=StepLogprobs(-0.5)) for byte in text.encode()]
    if reason is FinishReason.STOP:
        return [PREFILL, *tokens, TokenStep(EOS, reason)]
    return [PREFILL, *tokens[:-1], TokenStep(tokens[-1].token_id, reason)]


PREFILL = PrefillDone(cached_tokens=1, prefill_ms=2.0)


class ScriptedEngine:
    """Answers each request with the same events, one at a time, then does as `ending` says.

    Attributes:
        requests: The submitted ones.
        loads: The options of each load.
        closing: Set when the engine was asked to close; it has closed when `drained` is set too.
        hanging: Set when all events of a request were played and the rest is silence.
        cancelled: Ids that were cancelled; `left` is set at each.
    """

    def __init__(
        self,
        events: Sequence[EngineEvent] = (),
        *,
        ending: BackendError | Exception | None = None,
        hangs: bool = False,
        load_error: BaseException | None = None,
        loaded: bool = True,
        fault: str = "",
    ) -> None:
        self.fault = fault
        self._note_fault: Callable[[], None] = lambda: None
        self.requests: list[GenerationRequest] = []
        self.loads: list[ModelOptions] = []
        self.cancelled: list[str] = []
        self.expected: list[str] = []
        self.left_early: list[str] = []
        self.hanging = asyncio.Event()
        self.left = asyncio.Event()
        self.load_left = asyncio.Event()
        self.closing = asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()
        self._events = events
        self._ending = ending
        self._hangs = hangs
        self._load_error = load_error
        self.model: ServedModel | None = None
        if loaded:
            self._take(ModelOptions(model="org/tiny"))

    async def loaded_model(self, timeout_s: float) -> ServedModel | None:  # noqa: ARG002
        return self.model

    def preparation(self, _request_id: str) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, _model: ServedModel, request: GenerationRequest) -> AsyncIterator[Steps]:
        self.requests.append(request)
        return self._play()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.left.set()

    def expect(self, request_id: str, *, is_again: bool = False) -> None:
        (self.left_early if is_again else self.expected).append(request_id)

    def on_fault(self, listener: Callable[[], None]) -> None:
        self._note_fault = listener

    def become(self, fault: str) -> None:
        """Break, or work again when there is no fault."""
        self.fault = fault
        self._note_fault()

    async def load(self, options: ModelOptions) -> ModelCard:
        self.loads.append(options)
        try:
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.load_left.set()
        if self._load_error is not None:
            raise self._load_error
        return self._take(options)

    async def free(self) -> None:
        self.model = None

    def status(self) -> EngineStatus:
        state = EngineState.READY if self.model else EngineState.UNINITIALIZED
        return replace(STATUS, state=state)

    async def close(self, **_options: float) -> None:
        self.closing.set()
        await self.drained.wait()

    async def _play(self) -> AsyncIterator[Steps]:
        for event in self._events:
            yield steps_of(event)
        if self._ending is not None:
            raise self._ending
        if self._hangs:
            self.hanging.set()
            await asyncio.Event().wait()

    def _take(self, options: ModelOptions) -> ModelCard:
        self.model = make_model(options)
        return self.model.card


def make_model(options: ModelOptions) -> ServedModel:
    """Return a model of bytes, whose template writes a line per message."""
    card = ModelCard(
        name=options.model,
        path="",
        model_type="bytes",
        context_length=4096,
        vocab_size=256,
        eos_token_ids=frozenset({EOS}),
        weights_bytes=5,
        supports_tools=True,
        supports_thinking=False,
    )
    template = ChatTemplate(_render_lines)
    loaded = LoadedModel(tokenizer=ByteTokenizer(), template=template, card=card)
    return ServedModel.of(loaded, options)


def _render_lines(turns: Any, schemas: Any, options: Any) -> str:
    lines = [f"{turn['role']}: {turn['content']}\n" for turn in turns]
    return f"{list(schemas or ())}{dict(options)}\n{''.join(lines)}assistant: "


def server_of(
    engine: ServedEngine,
    *,
    tracing: Sequence[grpc.aio.ServerInterceptor] = (),
    **config: Any,
) -> BackendServer:
    """Return a server of an engine, on a free port if no address is given; not started yet."""
    settings = ServerConfig(**{"address": "127.0.0.1:0", **config})
    server = BackendServer(settings, tracing)
    server.serve(Services(settings, engine))
    return server


@asynccontextmanager
async def served(engine: ScriptedEngine, **config: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the engine on a free port, and return a channel to it."""
    server = server_of(engine, **config)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop()


def stub(channel: grpc.aio.Channel) -> Any:
    """Return the client of the service."""
    return backend_pb2_grpc.BackendStub(channel)


def inspector(channel: grpc.aio.Channel) -> Any:
    """Return the client of the service beside it."""
    return backend_pb2_grpc.InspectorStub(channel)
