"""One `pb.PredictOptions` -> one `GenerationCall`: parsed once, strictly, here at the edge."""

import uuid
from collections.abc import Iterable

from backend.config import (
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    ModelOptions,
)
from backend.core.request import GenerationCall, Priority, Remembered
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.conversation import allows_parallel_calls, messages, template_options
from backend.rpc.limits import require_path, require_printable
from backend.rpc.media_fields import media
from backend.rpc.sampling_fields import sampling_params
from backend.rpc.tool_fields import tool_choice, tools

SCHEMA_KEY = "json_schema"
PRIORITY_KEY = "priority"
PRIORITIES = {priority.name.lower(): priority for priority in Priority}
PROMPT_FIELDS = (
    *("Prompt", "UseTokenizerTemplate", "Messages", "Tools", "ToolChoice", "Metadata"),
    *("Images", "Audios", "Videos"),
)


def generation_call(request: pb.PredictOptions, options: ModelOptions) -> GenerationCall:
    """Return what a request means, its gaps filled by the options of the loaded model.

    Raises:
        InvalidRequestError: A field is malformed, out of range or missing.
    """
    tuning = options.tuning
    is_chat = request.UseTokenizerTemplate and len(request.Messages) > 0
    offered = tools(request.Tools)
    return GenerationCall(
        request_id=_request_id(request.CorrelationId),
        prompt="" if is_chat else _prompt(request),
        messages=messages(request) if is_chat else (),
        media=media(request, options.media_limits),
        tools=offered,
        tool_choice=tool_choice(request.ToolChoice, offered),
        template_options=template_options(request.Metadata, tuning),
        sampling=sampling_params(request, tuning),
        max_tokens=request.Tokens if request.Tokens > 0 else tuning.max_tokens,
        stop_strings=_stop_strings(request.StopPrompts),
        ignore_eos=request.IgnoreEOS,
        top_logprobs=_top_logprobs(request),
        grammar=_grammar(request),
        parallel_tool_calls=allows_parallel_calls(request.Metadata),
        constrains_calls=tuning.constrain_calls,
        remembered=_remembered(request),
        cache_path=require_path("PromptCachePath", request.PromptCachePath),
        priority=_priority(request.Metadata.get(PRIORITY_KEY, "")),
        debug=request.Debug or request.DebugMode,
    )


def prompt_part(request: pb.PredictOptions) -> pb.PredictOptions:
    """Return a copy with the fields that make the prompt: no other matters to its tokens."""
    return pb.PredictOptions(**{name: getattr(request, name) for name in PROMPT_FIELDS})


def _prompt(request: pb.PredictOptions) -> str:
    if request.Prompt:
        return request.Prompt
    if request.UseTokenizerTemplate:
        raise InvalidRequestError("Messages", "is empty, and so is Prompt")
    raise InvalidRequestError("Prompt", "is empty")


def _request_id(correlation_id: str) -> str:
    """Return the caller's id made unique, since two of its requests may run at once."""
    unique = uuid.uuid4().hex[:12]
    if not correlation_id:
        return unique
    require_printable("CorrelationId", correlation_id, MAX_REQUEST_ID_CHARS)
    return f"{correlation_id}-{unique}"


def _grammar(request: pb.PredictOptions) -> str:
    """Return the text as it is: an error in it names its line and column."""
    texts = (request.Grammar, request.Metadata.get(SCHEMA_KEY, ""))
    return next((text for text in texts if text.strip()), "")


def _remembered(request: pb.PredictOptions) -> Remembered:
    """Return what may be stored; without a path, `PromptCacheAll` is just not set."""
    if request.PromptCacheRO:
        return Remembered.NOTHING
    if request.PromptCachePath and not request.PromptCacheAll:
        return Remembered.PROMPT
    return Remembered.ALL


def _priority(name: str) -> Priority:
    """Return who goes first; nothing said is normal."""
    if not name:
        return Priority.NORMAL
    if name not in PRIORITIES:
        problem = f"must be one of {', '.join(PRIORITIES)}, not {name[:32]!r}"
        raise InvalidRequestError(f"Metadata: {PRIORITY_KEY}", problem)
    return PRIORITIES[name]


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
    for field in ("Logprobs", "TopLogprobs"):
        asked = getattr(request, field)
        if not 0 <= asked <= MAX_TOP_LOGPROBS:
            problem = f"must be between 0 and {MAX_TOP_LOGPROBS}, not {asked}"
            raise InvalidRequestError(field, problem)
    return max(request.Logprobs, request.TopLogprobs) or None
