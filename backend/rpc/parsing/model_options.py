"""`pb.ModelOptions` to `ModelOptions`: parsed once, strictly, at the edge."""

import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from backend.config import (
    DEFAULT_TUNING,
    MAX_ENVIRONMENT_BYTES,
    MEMORY_UTILIZATION,
    Adapter,
    MediaLimits,
    ModelOptions,
    TuningOptions,
)
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.limits import require_path
from backend.rpc.parsing.tuning_options import check_range, tuning_options

_FLOAT_BITS = 16
_BITS = {
    **dict.fromkeys(("f16", "bf16", "f32"), _FLOAT_BITS),
    **dict.fromkeys(("q8_0", "q8"), 8),
    **dict.fromkeys(("q4_0", "q4_1", "q4"), 4),
}
# The digit is the width: q5_1, iq4_nl, q6_k.
_OTHER_NAME = re.compile(r"[it]?q([1-8])(_[a-z0-9]+)*")
_WIDTHS = (8, 4)

log = logging.getLogger(__name__)


def kv_bits(key_type: str, value_type: str) -> int | None:
    """Return the bits of a quantised KV cache; `None` leaves it as it is.

    If one is empty, the other decides for both.

    Raises:
        InvalidRequestError: A name is not one of llama.cpp's.
    """
    key_bits = _bits("CacheTypeKey", key_type)
    value_bits = _bits("CacheTypeValue", value_type)
    given = [bits for bits in (key_bits, value_bits) if bits is not None]
    widest = max(given, default=_FLOAT_BITS)
    if min(given, default=widest) < widest:
        text = "CacheTypeKey %s and CacheTypeValue %s: MLX has one width for both, which is %d bits"
        log.warning(text, key_type, value_type, widest)
    return None if widest == _FLOAT_BITS else widest


def _bits(field: str, name: str) -> int | None:
    name = name.strip().lower()
    if not name:
        return None
    if name in _BITS:
        return _BITS[name]
    match = _OTHER_NAME.fullmatch(name)
    if match is None:
        problem = f"{name!r} is unknown; known are {', '.join(_BITS)}"
        raise InvalidRequestError(field, problem)
    nearest = min(_WIDTHS, key=lambda bits: abs(bits - int(match[1])))
    log.warning("%s: MLX has no %s, using q%d_0", field, name, nearest)
    return nearest


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def environment_of(entries: Iterable[bytes]) -> tuple[tuple[str, str], ...]:
    """Return names and values, sorted by name; a later entry wins.

    Args:
        entries: Entries of a `map<string, string>` on the wire, or texts of the form NAME=value.

    Raises:
        InvalidRequestError: An entry is neither, a name cannot be one, or there are too many.
    """
    found = {}
    for index, entry in enumerate(entries):
        name, value = _map_entry(entry) or _assignment(f"EnvVars[{index}]", entry)
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"EnvVars[{index}]", f"{name!r} is not a name of a variable")
        if "\0" in value:
            raise InvalidRequestError("EnvVars", f"the value of {name} contains a zero byte")
        found[name] = value
    size = sum(len(name) + len(value) for name, value in found.items())
    if size > MAX_ENVIRONMENT_BYTES:
        problem = f"holds {size} characters, more than {MAX_ENVIRONMENT_BYTES}"
        raise InvalidRequestError("EnvVars", problem)
    return tuple(sorted(found.items()))


def _map_entry(entry: bytes) -> tuple[str, str] | None:
    """Return the key and the value of a map's entry; `None` for other bytes."""
    try:
        pair = pb.ModelOptions.EnvVar.FromString(entry)
    except DecodeError:
        return None
    return (pair.key, pair.value) if pair.key and pair.ByteSize() == len(entry) else None


def _assignment(field: str, entry: bytes) -> tuple[str, str]:
    try:
        name, equals, value = entry.decode().partition("=")
    except UnicodeDecodeError:
        raise InvalidRequestError(field, "is neither UTF-8 nor an entry of a map") from None
    if not equals:
        raise InvalidRequestError(field, f"{name[:64]!r} is not of the form NAME=value")
    return name, value


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
