"""Reports on the backend: state, counters, requests, the loaded model."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from backend.core.engine_status import EngineState, EngineStatus, MachineStatus, RequestStatus
from backend.core.metric_table import METRICS, Values, nested
from backend.core.prompt import MEDIA_MARKER, Message
from backend.errors import InvalidRequestError
from backend.model.text.template import ChatTemplate
from backend.output.reply_format import OutputFormat
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
        "prompt_cache": _prompt_cache(status.metrics),
    }
    return pb.MetricsResponse(
        prompt_json_for_slot=json.dumps(details),
        tokens_per_second=status.metrics["tokens_per_s"],
        tokens_generated=int(min(status.metrics["generated_tokens"], _INT32_MAX)),
        prompt_tokens_processed=int(min(status.metrics["prompt_tokens"], _INT32_MAX)),
    )


def inspect_reply(model: ServedModel | None, status: EngineStatus) -> pb.InspectReply:
    """Return the whole snapshot and the loaded model."""
    return pb.InspectReply(
        state=_STATES[status.state],
        model=_model_report(model) if model else None,
        memory=_memory(status),
        processes=[pb.ProcessReport(**asdict(process)) for process in status.processes],
        latest_restarts=[
            pb.RestartReport(reason=restart.reason, lost_s=round(restart.lost_s, 1))
            for restart in status.latest_restarts
        ],
        requests=[pb.RequestReport(**_request_entry(request)) for request in status.requests],
        machine=_machine(status.machine) if status.machine else None,
        metrics=_metrics(status.metrics),
        **_fields(pb.InspectReply.DESCRIPTOR, nested(status.metrics)),
    )


def prompt_cache_report(metrics: Values) -> pb.PromptCacheReport:
    """Return the numbers of the prompt cache."""
    return pb.PromptCacheReport(**_prompt_cache(metrics))


def _prompt_cache(metrics: Values) -> dict[str, Any]:
    return _fields(pb.PromptCacheReport.DESCRIPTOR, nested(metrics)["prompt_cache"])


def _metrics(values: Values) -> Iterator[pb.MetricReport]:
    for name, metric in METRICS.items():
        for key in metric.keys(name):
            yield pb.MetricReport(
                name=key,
                value=values.get(key, 0),
                kind=metric.kind.value,
                help=metric.help,
                words=metric.words,
                share_of=metric.share_of,
            )


def _fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401 (a descriptor)
    """Return the values that a message has fields for: numbers that are older than `metrics`."""
    return {
        name: _field(kind.fields_by_name[name], value)
        for name, value in values.items()
        if name in kind.fields_by_name
    }


def _field(field: Any, value: Any) -> Any:  # noqa: ANN401 (a number, or several)
    if isinstance(value, float):
        return round(value, 1)
    inner = field.message_type
    return value if inner is None or inner.GetOptions().map_entry else _fields(inner, value)


def _machine(machine: MachineStatus) -> pb.MachineReport:
    backends = [pb.BackendReport(**asdict(backend)) for backend in machine.backends]
    return pb.MachineReport(usable_bytes=machine.usable_bytes, backends=backends)


def _memory(status: EngineStatus) -> pb.MemoryUsageData:
    """Return memory by part, with MLX's memory as the total, and that of both processes."""
    parts = dict(status.memory_bytes)
    total = parts.get("mlx_active", 0) + parts.get("mlx_cache", 0)
    if resident := sum(process.resident_bytes for process in status.processes):
        parts["resident"] = resident
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
