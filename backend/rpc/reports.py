"""Reports on the backend: state, counters, requests, the loaded model."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

from backend.core.media import MEDIA_MARKER
from backend.core.prompt import Message
from backend.core.status import (
    EngineState,
    EngineStatus,
    MachineStatus,
    PromptCacheStatus,
    RequestStatus,
)
from backend.errors import InvalidRequestError
from backend.model.text.template import ChatTemplate
from backend.output.format import OutputFormat
from backend.pb import backend_pb2 as pb
from backend.pipeline.served_model import ServedModel

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
    memory = _memory(status)
    if status.machine is not None:
        memory.breakdown["machine_usable"] = status.machine.usable_bytes
        memory.breakdown["machine_claimed"] = status.machine.claimed_bytes
    return pb.StatusResponse(state=_STATES[status.state], memory=memory)


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


def inspect_reply(model: ServedModel | None, status: EngineStatus) -> pb.InspectReply:
    """Return the whole snapshot and the loaded model."""
    return pb.InspectReply(
        state=_STATES[status.state],
        model=_model_report(model) if model else None,
        memory=_memory(status),
        prompt_cache=prompt_cache_report(status.prompt_cache),
        slots_taken=status.slots_taken,
        waiting=status.waiting,
        prompt_tokens=status.prompt_tokens,
        generated_tokens=status.generated_tokens,
        tokens_per_s=round(status.tokens_per_s, 1),
        media_encoded=status.media_encoded,
        drafted_tokens=status.drafted_tokens,
        accepted_tokens=status.accepted_tokens,
        turn_s=round(status.turn_s, 1),
        processes=[pb.ProcessReport(**asdict(process)) for process in status.processes],
        restarts=status.restarts,
        lost_s=round(status.lost_s, 1),
        latest_restarts=[
            pb.RestartReport(reason=restart.reason, lost_s=round(restart.lost_s, 1))
            for restart in status.latest_restarts
        ],
        requests=[pb.RequestReport(**_request_entry(request)) for request in status.requests],
        machine=_machine(status.machine) if status.machine else None,
    )


def prompt_cache_report(books: PromptCacheStatus) -> pb.PromptCacheReport:
    """Return the counts of the prompt cache."""
    return pb.PromptCacheReport(**_prompt_cache_entry(books))


def _machine(machine: MachineStatus) -> pb.MachineReport:
    backends = [pb.BackendReport(**asdict(backend)) for backend in machine.backends]
    return pb.MachineReport(usable_bytes=machine.usable_bytes, backends=backends)


def _memory(status: EngineStatus) -> pb.MemoryUsageData:
    """Return memory by part, with MLX's memory as the total."""
    parts = status.memory_bytes
    total = parts.get("mlx_active", 0) + parts.get("mlx_cache", 0)
    return pb.MemoryUsageData(total=total, breakdown=parts)


def _model_report(model: ServedModel) -> pb.ModelReport:
    card = model.card
    return pb.ModelReport(
        name=card.name,
        type=card.model_type,
        path=card.path,
        context_length=card.context_length or 0,
        max_slots=model.tuning.scheduling.max_slots,
        draft_model=card.draft_model,
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


async def metadata_response(model: ServedModel) -> pb.ModelMetadataResponse:
    """Return the abilities of a model, and a prompt that asks it to think."""
    return pb.ModelMetadataResponse(
        supports_thinking=model.card.supports_thinking,
        rendered_template=await asyncio.to_thread(_render_sample, model.template),
        tool_format=_tool_format(model.format),
        media_marker=MEDIA_MARKER if model.media else "",
    )


def _render_sample(template: ChatTemplate) -> str:
    try:
        return template.render(_SAMPLE, (), {"enable_thinking": True})
    except InvalidRequestError:
        return ""


def _tool_format(output_format: OutputFormat) -> pb.ToolFormatMarkers:
    return pb.ToolFormatMarkers(
        format_type=output_format.tools.name,
        per_call_start=output_format.tools.opener,
        per_call_end=output_format.tools.closer,
        reasoning_start=output_format.reasoning.start,
        reasoning_end=output_format.reasoning.end,
    )
