"""`pb.PredictOptions` to `GenerationCall`: parsed once, strictly, at the edge.

A value that a request leaves open comes from the model's options, or else is off. In the fields of
sampling proto3's zero stands for "unset", except in `Temperature`, where it is greedy, and in
`Seed`, where it is a seed.
"""

import logging
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import TypeVar

from backend.config import (
    MAX_LOGIT_BIASES,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    ModelOptions,
    RequestDefaults,
    TuningOptions,
)
from backend.core.prompt import Message, new_scope
from backend.core.request import (
    CacheHint,
    GenerationCall,
    GenerationParams,
    Priority,
    Remembered,
    SamplingParams,
    new_id,
)
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.host_rules import (
    obeyed_grammar,
    restore_tool_results,
    ruling_text,
    without_billing,
)
from backend.rpc.parsing.checks import (
    Range,
    json_type,
    parse_json,
    require_at_most,
    require_object,
    require_path,
    require_printable,
    require_range,
    truth,
)
from backend.rpc.parsing.load_options import RANGES
from backend.rpc.parsing.message_fields import (
    continues,
    in_order_of_calls,
    media,
    messages,
    template_options,
    thinking_budget,
    tool_use,
)

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

log = logging.getLogger(__name__)


def sampling_params(request: pb.PredictOptions, defaults: RequestDefaults) -> SamplingParams:
    """Return the sampling of a request."""
    numbers = {
        name: _number(field, request, RANGES.get(name, _ANY)) or getattr(defaults, name)
        for name, field in _NUMBERS.items()
    }
    top_k = require_range("TopK", request.TopK, RANGES["top_k"])
    return SamplingParams(
        temperature=_number("Temperature", request, Range(0)),
        # -1 disables it for this request.
        top_k=max(top_k or defaults.top_k or 0, 0),
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
    return require_range(field, value, bounds)


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
    value = parse_json("LogitBias", text)
    entries = {} if value is None else require_object("LogitBias", value)
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


SCOPE_KEY = "cache_scope"
PUBLIC_KEY = "cache_public"
PUBLIC_SYSTEM = "system"
HINT_KEY = "cache_hint"
HINTS = {hint.value: hint for hint in (CacheHint.KEEP, CacheHint.ONCE)}
PRIORITY_KEY = "priority"
PRIORITIES = {priority.name.lower(): priority for priority in Priority}
SPECULATION_KEY = "speculation"
PROMPT_FIELDS = (
    *("Prompt", "UseTokenizerTemplate", "Messages", "Tools", "ToolChoice", "Metadata"),
    *("Images", "Audios", "Videos"),
)

T = TypeVar("T")


def generation_call(
    request: pb.PredictOptions, options: ModelOptions, size_bytes: int = 0
) -> GenerationCall:
    """Return the call of a request of so many bytes; the model's options fill its gaps."""
    tuning = options.tuning
    is_chat = request.UseTokenizerTemplate and len(request.Messages) > 0
    use = tool_use(request)
    conversation = _conversation(request) if is_chat else ()
    return GenerationCall(
        params=_params(request, tuning),
        prompt="" if is_chat else _prompt(request),
        messages=conversation,
        continues=is_chat and continues(request.Metadata, conversation),
        media=media(request, options.media_limits),
        tools=use.tools,
        tool_choice=use.choice,
        template_options=template_options(request.Metadata, tuning.requests),
        stop_strings=_stop_strings(request.StopPrompts),
        ignore_eos=request.IgnoreEOS,
        grammar=obeyed_grammar(ruling_text(request), use.tools if is_chat else ()),
        parallel_tool_calls=use.is_parallel,
        constrains_calls=tuning.text.constrain_calls or any(tool.is_strict for tool in use.tools),
        thinking_budget=thinking_budget(request.Metadata, tuning.requests),
        cache_scope=_cache_scope(request, tuning.prompt_cache.cache_sharing),
        shares_system_prompt=_known(PUBLIC_KEY, request, {PUBLIC_SYSTEM: True}, default=False),
        debug=request.Debug or request.DebugMode,
        size_bytes=size_bytes,
    )


def _params(request: pb.PredictOptions, tuning: TuningOptions) -> GenerationParams:
    return GenerationParams(
        request_id=_request_id(request.CorrelationId),
        sampling=sampling_params(request, tuning.requests),
        max_tokens=request.Tokens if request.Tokens > 0 else tuning.requests.max_tokens,
        top_logprobs=_top_logprobs(request),
        remembered=_remembered(request, tuning.prompt_cache.cache_sharing),
        cache_hint=_known(HINT_KEY, request, HINTS, CacheHint.NONE),
        cache_path=require_path("PromptCachePath", request.PromptCachePath),
        priority=_known(PRIORITY_KEY, request, PRIORITIES, Priority.NORMAL),
        may_speculate=truth(request.Metadata.get(SPECULATION_KEY)) is not False,
        # Hosts send 0 for unset.
        max_draft_tokens=require_range("NDraft", request.NDraft, Range(0)) or None,
    )


def named_scope(name: str) -> str:
    """Return the scope of requests with this name."""
    return f"named {name}"


def prompt_part(request: pb.PredictOptions) -> pb.PredictOptions:
    """Return a copy with only the fields that determine the prompt's tokens."""
    return pb.PredictOptions(**{name: getattr(request, name) for name in PROMPT_FIELDS})


def _prompt(request: pb.PredictOptions) -> str:
    if request.Prompt:
        return request.Prompt
    if request.UseTokenizerTemplate:
        raise InvalidRequestError("Messages", "is empty, and so is Prompt")
    unread = ", and Messages are read with UseTokenizerTemplate only" if request.Messages else ""
    raise InvalidRequestError("Prompt", f"is empty{unread}")


def _request_id(correlation_id: str) -> str:
    """Return the caller's id, made unique: two requests with one id may run at once."""
    unique = new_id()
    if not correlation_id:
        return unique
    require_printable("CorrelationId", correlation_id, MAX_REQUEST_ID_CHARS)
    return f"{correlation_id}-{unique}"


def _conversation(request: pb.PredictOptions) -> tuple[Message, ...]:
    return in_order_of_calls(restore_tool_results(without_billing(messages(request))))


def _cache_scope(request: pb.PredictOptions, sharing: str) -> str:
    """Return the scope named by the caller, or that of the options."""
    if named := request.Metadata.get(SCOPE_KEY, ""):
        field = f"Metadata[{SCOPE_KEY!r}]"
        return named_scope(require_printable(field, named, MAX_REQUEST_ID_CHARS))
    if sharing == "identity":
        return f"identity {request.ModelIdentity}"
    return new_scope() if sharing == "none" else ""


def _remembered(request: pb.PredictOptions, sharing: str) -> Remembered:
    """Return the part that may be stored; `PromptCacheAll` matters only with a path."""
    is_private = sharing == "none" and not request.Metadata.get(SCOPE_KEY)
    if request.PromptCacheRO or is_private:
        return Remembered.NOTHING
    if request.PromptCachePath and not request.PromptCacheAll:
        return Remembered.PROMPT
    return Remembered.ALL


def _known(key: str, request: pb.PredictOptions, values: Mapping[str, T], default: T) -> T:
    """Return the value of a word; other clients may use the same key for their own words."""
    word = request.Metadata.get(key, "")
    if word and word not in values:
        log.info("Metadata[%r] is ignored: %r is not one of %s", key, word[:32], list(values))
    return values.get(word, default)


def _stop_strings(stop_prompts: Iterable[str]) -> tuple[str, ...]:
    distinct = tuple(dict.fromkeys(filter(None, stop_prompts)))
    if len(distinct) > MAX_STOP_STRINGS:
        problem = f"holds {len(distinct)} stop strings, at most {MAX_STOP_STRINGS} are allowed"
        raise InvalidRequestError("StopPrompts", problem)
    longest = max(map(len, distinct), default=0)
    if longest > MAX_STOP_STRING_CHARS:
        problem = f"has a text of {longest} characters, at most {MAX_STOP_STRING_CHARS} are allowed"
        raise InvalidRequestError("StopPrompts", problem)
    return distinct


def _top_logprobs(request: pb.PredictOptions) -> int | None:
    """Return the larger of the two fields: the host sets both, other callers either."""
    fields, bounds = ("Logprobs", "TopLogprobs"), Range(0, MAX_TOP_LOGPROBS)
    return max(require_range(field, getattr(request, field), bounds) for field in fields) or None
