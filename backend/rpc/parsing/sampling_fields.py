"""The sampling of a request: its own fields, then the model's options, then off.

In these fields proto3's zero stands for "unset", except in `Temperature`, where it is greedy, and
in `Seed`, where it is a seed.
"""

import math
import secrets
from collections.abc import Mapping

from backend.config import MAX_LOGIT_BIASES, RequestDefaults
from backend.core.request import SamplingParams
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.json_fields import json_type, parse_json, require_object
from backend.rpc.parsing.limits import require_at_most
from backend.rpc.parsing.tuning_options import RANGES, Range, require_range

FLOAT32_MAX = 3.4028234663852886e38
SEED_BITS = 31
TOKEN_ID_DIGITS = 10
_ANY = Range(-math.inf)
# The field of each parameter that is a model option too, with the option's bounds.
_NUMBERS = {
    "top_p": "TopP",
    "min_p": "MinP",
    "repetition_penalty": "Penalty",
    "presence_penalty": "PresencePenalty",
    "frequency_penalty": "FrequencyPenalty",
}


def sampling_params(request: pb.PredictOptions, defaults: RequestDefaults) -> SamplingParams:
    """Return the sampling of a request.

    Raises:
        InvalidRequestError: A field is not a number, or out of its range.
    """
    numbers = {
        name: _number(field, request, RANGES.get(name, _ANY)) or getattr(defaults, name)
        for name, field in _NUMBERS.items()
    }
    return SamplingParams(
        temperature=_number("Temperature", request, Range(0)),
        top_k=_top_k(request.TopK, defaults.top_k),
        penalty_window=max(request.Repeat, 0),
        logit_bias=_logit_bias(request.LogitBias),
        seed=_seed(request.Seed, defaults.seed),
        xtc_probability=defaults.xtc_probability,
        xtc_threshold=defaults.xtc_threshold,
        **{name: number for name, number in numbers.items() if number},
    )


def _number(field: str, request: pb.PredictOptions, bounds: Range) -> float:
    value: float = getattr(request, field)
    if not math.isfinite(value):
        raise InvalidRequestError(field, f"must be a finite number, not {value}")
    require_range(field, value, bounds)
    return value


def _top_k(top_k: int, default: int | None) -> int:
    """Return the limit: -1 disables it for this request, 0 uses the model's option."""
    if top_k < -1:
        raise InvalidRequestError("TopK", f"must be at least -1, not {top_k}")
    return max(top_k or default or 0, 0)


def _seed(seed: int, default: int | None) -> int:
    """Return the seed: a negative one, or 0 if the model's options set one, is not the caller's.

    The host draws one itself for a request without, so its 0 is a caller's.
    """
    if seed > 0 or (seed == 0 and default is None):
        return seed
    return secrets.randbits(SEED_BITS) if default is None else default


def _logit_bias(text: str) -> Mapping[int, float]:
    if not text.strip():
        return {}
    entries = require_object("LogitBias", parse_json("LogitBias", text))
    require_at_most("LogitBias", entries, MAX_LOGIT_BIASES)
    return {_token_id(key): _bias(key, value) for key, value in entries.items()}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= TOKEN_ID_DIGITS):
        raise InvalidRequestError("LogitBias", f"{key!r} is not a token id")
    return int(key)


def _bias(key: str, value: object) -> float:
    field = f'LogitBias["{key}"]'
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(field, f"must be a number, not {json_type(value)}")
    if not abs(value) <= FLOAT32_MAX:
        raise InvalidRequestError(field, "must be a finite number")
    return float(value)
