"""`pb.ModelOptions` to `ModelOptions`, with `Options` and `EngineArgs`: parsed once, strictly."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from backend.config import (
    DEFAULT_TUNING,
    MAX_ENVIRONMENT_BYTES,
    MAX_SLOTS,
    MEMORY_UTILIZATION,
    MIN_MEMORY_UTILIZATION,
    Adapter,
    MediaLimits,
    ModelOptions,
    TuningOptions,
)
from backend.core.scoring import Pooling, RerankerKind
from backend.errors import (
    InvalidRequestError,
    LoadError,
    ModelNotFoundError,
    UnreadableTokenizerError,
    UnsupportedModelError,
)
from backend.formats.format import FORCED
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.checks import (
    JsonObject,
    Range,
    parse_json,
    require_absolute,
    require_object,
    require_path,
    require_range,
)
from common.log import shortened
from common.options import OptionField, OptionValue, described, option_fields, split_entry
from common.rpc import model_name

OPTION_FIELDS = option_fields(TuningOptions)
_PARSER = "tool_parser"
_FORCED_PARSER = f"{_PARSER}{FORCED}"


RANGES = {
    "max_slots": Range(1, MAX_SLOTS),
    "max_waiting": Range(0),
    "prefill_chunk": Range(1),
    "prefill_chunk_alone": Range(1),
    "prefill_pause_ms": Range(1),
    "max_replies_per_s": Range(0),
    "max_kv_bytes": Range(1),
    "expected_tokens": Range(1),
    "expert_bytes": Range(1),
    "max_cache_bytes": Range(0),
    "max_cache_disk_bytes": Range(0),
    "max_tokens": Range(1),
    "top_p": Range(0, 1),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0),
    "seed": Range(0),
    "thinking_budget": Range(0),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 1),
    "side_share": Range(0.01, 1),
    "wired_limit_mb": Range(0, 2**32),
    "tensor_parallel_size": Range(1, 1024),
    "worker_timeout_s": Range(1),
    "engine_timeout_s": Range(0),
    "reload_timeout_s": Range(0),
    "max_draft_tokens": Range(1, 64),
}

# Widths and group sizes of MLX, and names.
CHOICES: Mapping[str, Sequence[OptionValue]] = {
    "cache_bits": (4, 8),
    "calls_in_thoughts": ("draft", "call"),
    "control_tokens": ("plain", "trusted"),
    "cache_sharing": ("all", "identity", "none"),
    "experts": ("resident", "disk"),
    "kv_bits": (4, 8),
    "kv_group_size": (32, 64, 128),
    "pooling": tuple(pooling.value for pooling in Pooling),
    "reranker": tuple(kind.value for kind in RerankerKind),
    "speculation": ("auto", "lookup", "draft", "mtp", "off"),
    "distributed": ("tensor", "pipeline"),
    "distributed_backend": ("ring", "jaccl", "nccl", "mpi", "any"),
}

PATH_OPTIONS = frozenset({"cache_dir", "hostfile"})
# Made where they are missing: in the host's working directory nobody would look for it.
ABSOLUTE_OPTIONS = frozenset({"cache_dir"})

Given = TypeVar("Given")

# Each takes a look at all known options.
_MAX_HINTS = 8

log = logging.getLogger(__name__)


def tuning_options(
    options: Iterable[str], engine_args: str, defaults: TuningOptions = DEFAULT_TUNING
) -> TuningOptions:
    """Return the typed options; those of `EngineArgs` win.

    Args:
        options: Of the form `key:value`; a bare key means true.
    """
    texts = _read("Options", _known_options(options), OptionField.from_text)
    values = _read("EngineArgs", _engine_args(engine_args), OptionField.from_json)
    return defaults.updated(**(texts | values))


def _known_options(options: Iterable[str]) -> dict[str, str]:
    entries = _with_forced(split_entry(entry) for entry in options)
    unknown = dict.fromkeys(name for name, _ in entries if name not in OPTION_FIELDS)
    if unknown:
        # Hosts and importers add options for other backends to every model.
        names = described(tuple(unknown)[:_MAX_HINTS], OPTION_FIELDS, {})
        more = ", ".join(tuple(unknown)[_MAX_HINTS:])
        text = ", ".join(filter(None, (names, more)))
        log.info("Options: ignoring unknown options: %s", shortened(text))
    known = [(name, _text(name, text)) for name, text in entries if name in OPTION_FIELDS]
    return {name: text for name, text in known if text is not None}


def _with_forced(entries: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Return entries with `tool_parser!:NAME` as `tool_parser:NAME!`, after those it overrides."""
    hints, forced = [], []
    for name, text in entries:
        if name == _FORCED_PARSER:
            forced.append((_PARSER, text and f"{text}{FORCED}"))
        else:
            hints.append((name, text))
    return hints + forced


def _text(name: str, text: str | None) -> str | None:
    """Return the text of an entry; a bare name sets a boolean option to true."""
    if text is None and OPTION_FIELDS[name].kind is bool:
        return "true"
    if text is None:
        log.warning("Options: ignoring %s, which has no value", name)
    return text


def _engine_args(text: str) -> JsonObject:
    if not text.strip():
        return {}
    given = dict(require_object("EngineArgs", parse_json("EngineArgs", text)))
    if isinstance(forced := given.get(_FORCED_PARSER), str):
        del given[_FORCED_PARSER]
        given[_PARSER] = f"{forced}{FORCED}"
    unknown = [name for name in given if name not in OPTION_FIELDS]
    if unknown:
        problem = f"unknown: {', '.join(unknown)}; valid names are {', '.join(OPTION_FIELDS)}"
        raise InvalidRequestError("EngineArgs", problem)
    return given


def _read(
    source: str, given: Mapping[str, Given], read: Callable[[OptionField, Given], OptionValue]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = read(OPTION_FIELDS[name], value)
        except ValueError as error:
            raise InvalidRequestError(f"{source}: {name}", str(error)) from None
        if name in PATH_OPTIONS:
            require_path(f"{source}: {name}", values[name] or "")
        if name in ABSOLUTE_OPTIONS and values[name]:
            require_absolute(f"{source}: {name}", values[name])
        check_range(f"{source}: {name}", name, values[name])
        _check_choice(f"{source}: {name}", name, values[name])
    return values


def check_range(field: str, name: str, value: OptionValue) -> None:
    """Refuse a value beyond the bounds of an option."""
    if name in RANGES and isinstance(value, int | float):
        require_range(field, value, RANGES[name])


def _check_choice(field: str, name: str, value: OptionValue) -> None:
    choices = CHOICES.get(name)
    if choices is not None and value is not None and value not in choices:
        known = ", ".join(map(str, choices))
        raise InvalidRequestError(field, f"must be one of {known}, not {value}")


_FLOAT_BITS = 16
_BITS = {
    **dict.fromkeys(("f16", "bf16", "f32"), _FLOAT_BITS),
    **dict.fromkeys(("q8_0", "q8"), 8),
    **dict.fromkeys(("q4_0", "q4_1", "q4"), 4),
}
# The digit is the width: q5_1, iq4_nl, q6_k.
_OTHER_NAME = re.compile(r"[it]?q([1-8])(_[a-z0-9]{1,8}){0,3}")
_WIDTHS = (8, 4)


def kv_bits(key_type: str, value_type: str) -> int | None:
    """Return the bits of a quantised KV cache; `None` leaves it as it is.

    If one is empty, the other decides for both.
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

# Errors of the model that a caller has named; others are of this machine, or of the engine.
_OF_CALLERS = (LoadError, ModelNotFoundError, UnsupportedModelError, UnreadableTokenizerError)


@contextmanager
def model_named(request: pb.ModelOptions) -> Iterator[None]:
    """Have an error of a load tell the field of the model, unless it has another."""
    try:
        yield
    except LoadError as error:
        if error.field or type(error) not in _OF_CALLERS:
            raise
        text = str(error)
        is_file = not request.Model or (request.ModelFile and request.ModelFile in text)
        raise type(error)(text, field="ModelFile" if is_file else "Model") from error


PATH_FIELDS = ("Model", "ModelFile", "ModelPath", "Tokenizer", "DraftModel")


def model_options(
    request: pb.ModelOptions, defaults: TuningOptions = DEFAULT_TUNING
) -> ModelOptions:
    """Return the options of a LoadModel. Fields of other engines are ignored."""
    if not (request.Model or request.ModelFile):
        raise InvalidRequestError("Model", "is empty, and so is ModelFile")
    for field in PATH_FIELDS:
        require_path(field, getattr(request, field))
    if request.LoraBase:
        log.warning("LoraBase is ignored: an adapter applies to the model it is loaded with")
    tuning = tuning_options(request.Options, request.EngineArgs, defaults)
    tuning = _with_draft_model(_with_cache_types(tuning, request), request)
    return ModelOptions(
        model=model_name(request.Model or request.ModelFile),
        model_file=model_name(request.ModelFile),
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
        tuning=_for_experts(_with_group_size(tuning, request.TensorParallelSize)),
    )


def _max_model_len(tokens: int) -> int | None:
    """Return the context limit, if any: it holds a prompt, and a token of the reply."""
    return require_range("MaxModelLen", tokens, Range(2 if tokens > 0 else 0)) or None


def _memory_utilization(share: float) -> float:
    """Return the share of the memory; hosts send 0 for unset."""
    bounds = Range(MIN_MEMORY_UTILIZATION if share > 0.0 else 0, 1)
    return require_range("GPUMemoryUtilization", share, bounds) or MEMORY_UTILIZATION


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


def _for_experts(tuning: TuningOptions) -> TuningOptions:
    """Turn drafts off if experts stay on disk: a pass over more tokens reads more of them."""
    if not tuning.checkpoint.keeps_experts_on_disk:
        return tuning
    if tuning.group.is_named:
        raise InvalidRequestError("experts", "stay on disk for a single process only")
    if tuning.speculation.speculation not in ("auto", "off") or tuning.speculation.draft_model:
        raise InvalidRequestError("experts", "on disk exclude a drafter: reading costs more")
    return tuning.updated(speculation="off")


def _media_limits(request: pb.ModelOptions) -> MediaLimits:
    """Return the given limits, or the defaults for 0."""
    fields = {
        "images": "LimitImagePerPrompt",
        "audios": "LimitAudioPerPrompt",
        "videos": "LimitVideoPerPrompt",
    }
    given: dict[str, int] = {
        name: require_range(field, getattr(request, field), Range(0))
        for name, field in fields.items()
    }
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
    return Adapter(require_path(field, path), scale or 1.0, field)
