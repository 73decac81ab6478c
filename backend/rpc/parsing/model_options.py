"""`pb.ModelOptions` to `ModelOptions`: parsed once, strictly, at the edge."""

import logging
import math
from pathlib import Path

from backend.config import (
    DEFAULT_TUNING,
    MEMORY_UTILIZATION,
    Adapter,
    MediaLimits,
    ModelOptions,
    TuningOptions,
)
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.cache_types import kv_bits
from backend.rpc.parsing.environment_fields import environment_of
from backend.rpc.parsing.limits import require_path
from backend.rpc.parsing.tuning_options import check_range, tuning_options

DTYPES = {
    "": None,
    "auto": None,
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}

PATH_FIELDS = ("Model", "ModelFile", "ModelPath", "Tokenizer", "DraftModel")

log = logging.getLogger(__name__)


def model_options(
    request: pb.ModelOptions, defaults: TuningOptions = DEFAULT_TUNING
) -> ModelOptions:
    """Return the options of a LoadModel. Fields of other engines are ignored.

    Raises:
        InvalidRequestError: A field is malformed, out of range or missing.
    """
    if not (request.Model or request.ModelFile):
        raise InvalidRequestError("Model", "is empty, and so is ModelFile")
    for field in PATH_FIELDS:
        require_path(field, getattr(request, field))
    if request.LoraBase:
        log.warning("LoraBase is ignored: an adapter applies to the model it is loaded with")
    tuning = tuning_options(request.Options, request.EngineArgs, defaults)
    tuning = _with_draft_model(_with_cache_types(tuning, request), request)
    return ModelOptions(
        model=request.Model or request.ModelFile,
        model_file=request.ModelFile,
        models_dir=Path(request.ModelPath) if request.ModelPath else None,
        tokenizer=request.Tokenizer,
        trust_remote_code=request.TrustRemoteCode,
        max_model_len=_max_model_len(request.MaxModelLen),
        dtype=_dtype(request.DType),
        memory_utilization=_memory_utilization(request.GPUMemoryUtilization),
        # Hosts send -1 or 0 for as many as there are cores.
        threads=request.Threads if request.Threads > 0 else None,
        adapters=_adapters(request),
        grammar_triggers=tuple(trigger.word for trigger in request.GrammarTriggers if trigger.word),
        media_limits=_media_limits(request),
        environment=environment_of(request.EnvVars),
        tuning=_with_group_size(tuning, request.TensorParallelSize),
    )


def _with_cache_types(tuning: TuningOptions, request: pb.ModelOptions) -> TuningOptions:
    """Use the fields if the option is not set."""
    bits = kv_bits(request.CacheTypeKey, request.CacheTypeValue)
    return tuning.updated(kv_bits=bits) if tuning.memory.kv_bits is None else tuning


def _with_draft_model(tuning: TuningOptions, request: pb.ModelOptions) -> TuningOptions:
    """Use the field if the option is not set; a host may send its models directory for unset."""
    named = tuning.speculation.draft_model or ""
    if not named and request.DraftModel.rstrip("/") != request.ModelPath.rstrip("/"):
        named = request.DraftModel
    require_path("draft_model", named)
    if tuning.speculation.speculation == "draft" and not named:
        raise InvalidRequestError("draft_model", "is missing, and speculation is draft")
    return tuning.updated(draft_model=named or None)


def _with_group_size(tuning: TuningOptions, size: int) -> TuningOptions:
    """Use the field if the option is not set; hosts send 0 for unset."""
    if size:
        check_range("TensorParallelSize", "tensor_parallel_size", size)
    is_open = tuning.group.tensor_parallel_size is None and size > 0
    return tuning.updated(tensor_parallel_size=size) if is_open else tuning


def _max_model_len(limit: int) -> int | None:
    if limit < 0:
        raise InvalidRequestError("MaxModelLen", f"is negative: {limit}")
    return limit or None


def _memory_utilization(share: float) -> float:
    """Return the given share, or the default for 0."""
    if not 0.0 <= share <= 1.0:
        raise InvalidRequestError("GPUMemoryUtilization", f"must be between 0 and 1, not {share:g}")
    return share or MEMORY_UTILIZATION


def _media_limits(request: pb.ModelOptions) -> MediaLimits:
    """Return the given limits, or the defaults for 0."""
    fields = {
        "images": "LimitImagePerPrompt",
        "audios": "LimitAudioPerPrompt",
        "videos": "LimitVideoPerPrompt",
    }
    given: dict[str, int] = {name: getattr(request, field) for name, field in fields.items()}
    for name, limit in given.items():
        if limit < 0:
            raise InvalidRequestError(fields[name], f"is negative: {limit}")
    return MediaLimits(**{name: limit for name, limit in given.items() if limit})


def _dtype(name: str) -> str | None:
    try:
        return DTYPES[name.strip().lower()]
    except KeyError:
        known = ", ".join(sorted(filter(None, set(DTYPES.values()))))
        raise InvalidRequestError("DType", f"{name!r} is unknown; known are {known}") from None


def _adapters(request: pb.ModelOptions) -> tuple[Adapter, ...]:
    paths, scales = list(request.LoraAdapters), list(request.LoraScales)
    if scales and len(scales) != len(paths):
        problem = f"holds {len(scales)} scales for {len(paths)} LoraAdapters"
        raise InvalidRequestError("LoraScales", problem)
    adapters = [
        _adapter(f"LoraAdapters[{index}]", path, scale)
        for index, (path, scale) in enumerate(zip(paths, scales or [0.0] * len(paths), strict=True))
    ]
    if request.LoraAdapter:
        adapters.insert(0, _adapter("LoraAdapter", request.LoraAdapter, request.LoraScale))
    return tuple(adapters)


def _adapter(field: str, path: str, scale: float) -> Adapter:
    if not path:
        raise InvalidRequestError(field, "is empty")
    if not (math.isfinite(scale) and scale >= 0.0):
        raise InvalidRequestError(field, f"has the scale {scale}, which is not a positive number")
    return Adapter(require_path(field, path), scale or 1.0)
