"""Rules for host behaviour that would harm its users: one function each, with the reason.

`docs/start/localai.md` lists them. Each changes a request or a reply no more than
necessary to give the host's user the expected result.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from backend.config import MAX_GRAMMAR_BYTES, ModelOptions
from backend.core.model import ModelCard, ModelKind
from backend.core.prompt import JsonValue, Message, Tool
from backend.core.step import Finish, FinishReason
from backend.errors import GrammarError, InvalidRequestError
from backend.model.checkpoint.config_file import DRAFTING, asks_for_several
from backend.model.text.template import RESERVED_OPTIONS
from backend.pb import backend_pb2 as pb

SCHEMA_KEY = "json_schema"
_JSON = json.JSONDecoder()
_JSON_SCHEMA = "json_schema"
# Keys of a `response_format` around its schema.
_AROUND_SCHEMA = frozenset({"type", "name", "description", "strict", "schema"})
_OWN_NAMES = ("mlx", "mlx-vlm", "mlx-distributed")
# The host glues the next text of the system prompt to it.
_BILLING = re.compile(r"x-anthropic-billing-header:(?:[ \t]*\w+=[^;\s]*;)+\s*")
_TOOL_RESULT = re.compile(r"^\[Tool Result for (?P<call_id>[^\]\n]+)\]: ?", re.MULTILINE)


def is_load_for_jobs(options: ModelOptions) -> bool:
    """Tell whether a LoadModel names the backend itself instead of a model.

    The host starts a process per job and loads "the model" `mlx` into it, which does not exist in
    the models folder. Such a load succeeds and loads nothing.
    """
    places = [Path(options.model_file)] if options.model_file else []
    if options.models_dir is not None:
        places.append(options.models_dir / options.model)
    return options.model in _OWN_NAMES and not any(place.exists() for place in places)


def unmet_wishes(request: pb.ModelOptions, card: ModelCard, options: ModelOptions) -> Iterator[str]:
    """Yield log messages about LoadModel fields without effect, and the values that apply instead.

    The host always sends a `ContextSize`, by default its own.
    """
    limit = card.context_length
    if request.ContextSize > 0 and (limit is None or request.ContextSize < limit):
        held = "the model has none" if limit is None else f"that is {limit} tokens"
        yield (
            f"ContextSize {request.ContextSize} does not limit the context: {held}; "
            "MaxModelLen (max_model_len) limits it"
        )
    speculation = options.tuning.speculation
    named = f"draft_model {speculation.draft_model!r}" if speculation.draft_model else None
    wanted = named or ("an MTP head" if speculation.speculation == "mtp" else None)
    if wanted and not card.draft_model:
        yield f"{wanted} is not loaded: {_why_without(options, card)}"


def restore_tool_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Turn tool results that arrive as user text back into tool messages.

    The host's Anthropic endpoint sends a result as a user message `[Tool Result for <id>]: <text>`.
    Only an id called in the previous turn counts; any other text stays the user's. The host glues a
    text after a result to it, without a separator: after JSON, it is the user's again.
    """
    restored: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        if message.tool_calls:
            names = {call.call_id: call.name for call in message.tool_calls}
        elif message.role not in ("user", "tool"):
            names = {}
        if message.role == "user" and names:
            restored += _results_in(message, names)
        else:
            restored.append(message)
    return tuple(restored)


def without_billing(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation without the line by which Claude Code has its requests billed.

    It begins the system prompt, and has a hash of the conversation, a word for subagents, and a
    number of the request at some addresses: no other conversation would begin with the same tokens.
    """
    first = messages[:1]
    if first and first[0].role == "system" and (line := _BILLING.match(first[0].content)):
        rest = first[0].content[line.end() :]
        first = (replace(first[0], content=rest),) if rest else ()
    return (*first, *messages[1:])


def wished_variables(
    variables: Mapping[str, JsonValue], metadata: Mapping[str, str]
) -> dict[str, JsonValue]:
    """Return a template's variables without the labels of a request that no template may get.

    The host copies all of a client's `metadata` among them. A label such as `conversation` is no
    wish to replace the conversation.
    """
    labels = RESERVED_OPTIONS & metadata.keys()
    return {name: value for name, value in variables.items() if name not in labels}


def ruling_text(request: pb.PredictOptions) -> str:
    """Return the rule of a reply: a whole schema goes before a grammar.

    The host makes its own grammar of a `response_format`, without `$defs`, `maxItems` and
    `pattern`. A schema in the metadata arrives whole, whether there is a `response_format` or not.
    A client may as well put its whole `response_format` there.
    """
    texts = (request.Metadata.get(SCHEMA_KEY, ""), request.Grammar)
    rule = next((text for text in texts if text.strip()), "")
    may_be_format = rule.lstrip().startswith("{") and len(rule) <= MAX_GRAMMAR_BYTES
    return _schema_in(rule) if may_be_format else rule


@contextmanager
def ruling_named(request: pb.PredictOptions) -> Iterator[None]:
    """Name the field of a rule that cannot be followed: the metadata's, if that holds it."""
    try:
        yield
    except GrammarError as error:
        if not request.Metadata.get(SCHEMA_KEY, "").strip():
            raise
        raise InvalidRequestError(f'Metadata["{SCHEMA_KEY}"]', error.problem) from None


def obeyed_grammar(grammar: str, tools: Sequence[Tool]) -> str:
    """Return the grammar unless it is the host's own for the calls of a strict tool.

    For a tool with `strict: true` the host writes a grammar of bare JSON calls and sends it
    together with `Tools`. It would force every reply to be a call, in a format that is not the
    model's. The model's own format enforces the tool's schema instead.
    """
    is_strict = any(tool.is_strict for tool in tools)
    is_for_calls = is_strict and any(_calls(grammar, tool.name) for tool in tools)
    return "" if is_for_calls else grammar


class WholeCalls:
    """Holds a call until something follows it, and leaves out one that the limit cut off.

    The host has no reason for the end of a reply. With a call it reports `tool_calls`, and its
    clients complete the JSON of half a call, and run it.
    """

    def __init__(self) -> None:
        self._held: list[pb.ToolCallDelta] = []

    def settle(self, reply: pb.Reply, finish: Finish | None) -> None:
        """Leave in a reply of the stream the calls that are known to be whole."""
        deltas = [passed for delta in reply.chat_deltas for passed in self._passed(delta)]
        if finish:
            deltas += self._released(finish.reason)
        del reply.chat_deltas[:]
        reply.chat_deltas.extend(deltas)

    def _passed(self, delta: pb.ChatDelta) -> Iterator[pb.ChatDelta]:
        for piece in delta.tool_calls:
            if self._held and self._held[0].index != piece.index:
                yield from self._released()
            self._held.append(piece)
        if not delta.tool_calls:
            yield from self._released()
            yield delta

    def _released(self, reason: FinishReason | None = None) -> Iterator[pb.ChatDelta]:
        pieces, self._held = self._held, []
        arguments = "".join(piece.arguments for piece in pieces)
        if not pieces or (reason is FinishReason.LENGTH and not _is_json(arguments)):
            return
        call = pb.ToolCallDelta()
        for piece in pieces:
            # An id or a name that comes later replaces the first.
            call.MergeFrom(piece)
        call.arguments = arguments or "{}"
        yield pb.ChatDelta(tool_calls=[call])


@dataclass(slots=True)
class AnswerlessReply:
    """Gives the last reply of a thought, or of half a call, a newline as content.

    The host generates a reply without an answer up to five more times, unless it used up the
    request's limit. Its test trims `message` but not the deltas, so white space passes it and
    clients show nothing.

    Attributes:
        max_tokens: The request's own limit; 0 is none.
    """

    max_tokens: int
    _has_answer: bool = False
    _has_thought: bool = False

    def settle(self, reply: pb.Reply, finish: Finish | None) -> None:
        """Record a reply of the stream, and give the last one content if needed."""
        if self._has_answer:
            return
        for delta in reply.chat_deltas:
            self._has_thought = self._has_thought or bool(delta.reasoning_content)
            self._has_answer = self._has_answer or bool(delta.content or delta.tool_calls)
        is_retried = finish and not self._has_answer
        is_cut = finish is not None and finish.reason is FinishReason.LENGTH
        is_within = not 0 < self.max_tokens <= reply.tokens
        if is_retried and is_within and (self._has_thought or is_cut):
            reply.chat_deltas.append(pb.ChatDelta(content="\n"))
            reply.message = b"\n"


class HostsReply:
    """A reply, in one message or several, as the host passes it on without harm.

    Other clients name no `ModelIdentity`, and get calls in pieces: they know the limit themselves.
    """

    def __init__(self, request: pb.PredictOptions) -> None:
        """Begin the reply to a request."""
        answerless = AnswerlessReply(request.Tokens)
        self._rules = (WholeCalls(), answerless) if request.ModelIdentity else (answerless,)

    def settle(self, reply: pb.Reply, finish: Finish | None) -> pb.Reply:
        """Return the next message of the reply; the last one has a finish."""
        for rule in self._rules:
            rule.settle(reply, finish)
        return reply


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _schema_in(text: str) -> str:
    """Return the rule that a `response_format` means, and any other text as it is.

    It is that of Chat Completions, of the Responses API, or llama.cpp's `json_object` with a
    schema; its inner object alone will do.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = value.get("type", _JSON_SCHEMA)
    inner = value.get(_JSON_SCHEMA, value)
    is_format = isinstance(inner, Mapping) and inner.keys() <= _AROUND_SCHEMA
    if not is_format or kind not in ("text", "json_object", _JSON_SCHEMA):
        return text
    if kind == "text":
        return ""
    schema = inner.get("schema", {"type": "object"} if kind == "json_object" else None)
    return text if schema is None else json.dumps(schema)


def _why_without(options: ModelOptions, card: ModelCard) -> str:
    speculation = options.tuning.speculation.speculation
    if speculation not in DRAFTING:
        return f"speculation is {speculation}"
    if card.kind is not ModelKind.DECODER:
        return f"a model of the kind {card.kind.value} generates nothing"
    if asks_for_several(options):
        return "nothing is drafted for a model on several processes"
    return "nothing is drafted for this model, and the log of its load says why"


def _results_in(message: Message, names: dict[str, str]) -> Iterator[Message]:
    marks = [mark for mark in _TOOL_RESULT.finditer(message.content) if mark["call_id"] in names]
    if not marks:
        yield message
        return
    if before := message.content[: marks[0].start()].strip():
        yield replace(message, content=before)
    stops = [*(mark.start() for mark in marks[1:]), len(message.content)]
    for mark, stop in zip(marks, stops, strict=True):
        text = message.content[mark.end() : stop]
        is_last = stop == len(message.content)
        result, glued = _parted(text) if is_last else (text.removesuffix("\n"), "")
        call_id = mark["call_id"]
        yield Message(role="tool", content=result, name=names[call_id], tool_call_id=call_id)
        if glued:
            yield replace(message, content=glued)


def _parted(text: str) -> tuple[str, str]:
    """Return a result and the text glued to it: a letter right after JSON shows the seam."""
    if not text.startswith(("{", "[")):
        return text, ""
    try:
        _, stop = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return text, ""
    return (text[:stop], text[stop:]) if text[stop : stop + 1].isalpha() else (text, "")


def _calls(grammar: str, name: str) -> bool:
    """Whether a rule of a grammar is a tool's name, as in the host's JSON and Llama 3.1 forms."""
    return f'::= "\\"{name}\\""' in grammar or f'-function ::= "{name}"' in grammar
