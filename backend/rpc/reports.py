"""What the backend tells about itself: state, counters, requests, the loaded model."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

from backend.core.media import MEDIA_MARKER
from backend.core.prompt import Message
from backend.core.status import EngineState, EngineStatus, PromptCacheStatus, RequestStatus
from backend.errors import InvalidRequestError, ModelNotLoadedError
from backend.generation import TextEngine, output_format
from backend.model.template import ChatTemplate
from backend.output.format import OutputFormat
from backend.pb import backend_pb2 as pb

_STATES = {
    EngineState.UNINITIALIZED: pb.StatusResponse.UNINITIALIZED,
    EngineState.BUSY: pb.StatusResponse.BUSY,
    EngineState.READY: pb.StatusResponse.READY,
    EngineState.ERROR: pb.StatusResponse.ERROR,
}
_INT32_MAX = 2**31 - 1
_SAMPLE = (Message(role="user", content="test"),)


def status_response(status: EngineStatus) -> pb.StatusResponse:
    """Return state and memory."""
    return pb.StatusResponse(state=_STATES[status.state], memory=_memory(status))


def metrics_response(status: EngineStatus) -> pb.MetricsResponse:
    """Return the totals since the model was loaded; requests and prompt cache as JSON."""
    details = {
        "requests": [_request_entry(request) for request in status.requests],
        "prompt_cache": _prompt_cache_entry(status.prompt_cache),
    }
    return pb.MetricsResponse(
        prompt_json_for_slot=json.dumps(details),
        tokens_per_second=status.tokens_per_s,
        tokens_generated=min(status.generated_tokens, _INT32_MAX),
        prompt_tokens_processed=min(status.prompt_tokens, _INT32_MAX),
    )


def inspect_reply(engine: TextEngine, status: EngineStatus) -> pb.InspectReply:
    """Return all of a snapshot, and what is loaded."""
    return pb.InspectReply(
        state=_STATES[status.state],
        model=_model_report(engine),
        memory=_memory(status),
        prompt_cache=pb.PromptCacheReport(**_prompt_cache_entry(status.prompt_cache)),
        slots_taken=status.slots_taken,
        waiting=status.waiting,
        prompt_tokens=status.prompt_tokens,
        generated_tokens=status.generated_tokens,
        tokens_per_s=round(status.tokens_per_s, 1),
        media_encoded=status.media_encoded,
        turn_s=round(status.turn_s, 1),
        requests=[pb.RequestReport(**_request_entry(request)) for request in status.requests],
    )


def _memory(status: EngineStatus) -> pb.MemoryUsageData:
    """Return the parts, and as their total what MLX holds from the system."""
    parts = status.memory_bytes
    total = parts.get("mlx_active", 0) + parts.get("mlx_cache", 0)
    return pb.MemoryUsageData(total=total, breakdown=parts)


def _model_report(engine: TextEngine) -> pb.ModelReport | None:
    if engine.model is None or engine.options is None:
        return None
    card = engine.model.card
    return pb.ModelReport(
        name=card.name,
        type=card.model_type,
        path=card.path,
        context_length=card.context_length or 0,
        max_slots=engine.options.tuning.max_slots,
    )


def _request_entry(request: RequestStatus) -> dict[str, Any]:
    return {
        **asdict(request),
        "phase": request.phase.value,
        "hit_kind": request.hit_kind.value,
        "first_token_ms": round(request.first_token_ms, 1),
        "tokens_per_s": round(request.tokens_per_s, 1),
    }


def _prompt_cache_entry(books: PromptCacheStatus) -> dict[str, Any]:
    hits = {kind.value: count for kind, count in books.hits.items()}
    return {**asdict(books), "hits": hits}


async def metadata_response(engine: TextEngine) -> pb.ModelMetadataResponse:
    """Return what the loaded model can do, and how a prompt looks when it is asked to think.

    Raises:
        ModelNotLoadedError: Nothing is loaded.
    """
    if engine.model is None:
        raise ModelNotLoadedError
    return pb.ModelMetadataResponse(
        supports_thinking=engine.model.card.supports_thinking,
        rendered_template=await asyncio.to_thread(_render_sample, engine.model.template),
        tool_format=_tool_format(output_format(engine)),
        media_marker=MEDIA_MARKER if engine.model.media else "",
    )


def _render_sample(template: ChatTemplate) -> str:
    try:
        return template.render(_SAMPLE, (), {"enable_thinking": True})
    except InvalidRequestError:
        return ""


def _tool_format(wire: OutputFormat) -> pb.ToolFormatMarkers:
    return pb.ToolFormatMarkers(
        format_type=wire.tools.name,
        per_call_start=wire.tools.opener,
        per_call_end=wire.tools.closer,
        reasoning_start=wire.reasoning.start,
        reasoning_end=wire.reasoning.end,
    )
