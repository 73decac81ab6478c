"""`Options` and `EngineArgs` of a LoadModel to `TuningOptions`."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from backend.config import DEFAULT_TUNING, MAX_SLOTS, TuningOptions
from backend.core.embedding import Pooling
from backend.core.scoring import RerankerKind
from backend.errors import InvalidRequestError
from backend.formats.format import FORCED
from backend.rpc.parsing.json_fields import JsonObject, parse_json, require_object
from common.options import OptionField, OptionValue, option_fields, split_entry

OPTION_FIELDS = option_fields(TuningOptions)
_PARSER = "tool_parser"
_FORCED_PARSER = f"{_PARSER}{FORCED}"


class Range(NamedTuple):
    """Inclusive bounds of a number."""

    low: float
    high: float = math.inf


RANGES = {
    "max_slots": Range(1, MAX_SLOTS),
    "max_waiting": Range(0),
    "prefill_chunk": Range(1),
    "prefill_chunk_alone": Range(1),
    "prefill_pause_ms": Range(1),
    "max_replies_per_s": Range(0),
    "max_kv_bytes": Range(1),
    "expected_tokens": Range(1),
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
    "wired_limit_mb": Range(0),
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
    "kv_bits": (4, 8),
    "kv_group_size": (32, 64, 128),
    "pooling": tuple(pooling.value for pooling in Pooling),
    "reranker": tuple(kind.value for kind in RerankerKind),
    "speculation": ("auto", "lookup", "draft", "mtp", "off"),
    "distributed": ("tensor", "pipeline"),
    "distributed_backend": ("ring", "jaccl", "nccl", "mpi", "any"),
}

Given = TypeVar("Given")

log = logging.getLogger(__name__)


def tuning_options(
    options: Iterable[str], engine_args: str, defaults: TuningOptions = DEFAULT_TUNING
) -> TuningOptions:
    """Return the typed options; those of `EngineArgs` win.

    Args:
        options: Of the form `key:value`; a bare key means true.

    Raises:
        InvalidRequestError: A value does not fit, or `EngineArgs` has an unknown key.
    """
    texts = _read("Options", _known_options(options), OptionField.from_text)
    values = _read("EngineArgs", _engine_args(engine_args), OptionField.from_json)
    return defaults.updated(**(texts | values))


def _known_options(options: Iterable[str]) -> dict[str, str]:
    entries = _with_forced(split_entry(entry) for entry in options)
    unknown = dict.fromkeys(name for name, _ in entries if name not in OPTION_FIELDS)
    if unknown:
        # Hosts and importers add options for other backends to every model.
        log.info("Options: ignoring unknown options: %s", ", ".join(unknown))
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
        check_range(f"{source}: {name}", name, values[name])
        _check_choice(f"{source}: {name}", name, values[name])
    return values


def check_range(field: str, name: str, value: OptionValue) -> None:
    """Refuse a value beyond the bounds of an option.

    Raises:
        InvalidRequestError: Names the field.
    """
    if name in RANGES and isinstance(value, int | float):
        require_range(field, value, RANGES[name])


def require_range(field: str, value: float, bounds: Range) -> None:
    """Refuse a number beyond bounds; not a number is beyond all.

    Raises:
        InvalidRequestError: Names the field.
    """
    low, high = bounds
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise InvalidRequestError(field, f"must be {limits}, not {value:g}")


def _check_choice(field: str, name: str, value: OptionValue) -> None:
    choices = CHOICES.get(name)
    if choices is not None and value is not None and value not in choices:
        known = ", ".join(map(str, choices))
        raise InvalidRequestError(field, f"must be one of {known}, not {value}")
