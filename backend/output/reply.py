"""One reply: consumes engine steps, emits deltas and exactly one finish."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol, assert_never

from msgspec.structs import replace

from backend.core.step import (
    AlternativeLogprob,
    ContentDelta,
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    StepLogprobs,
    Steps,
    TokenLogprob,
    ToolCallDelta,
)
from backend.output.citations import CitedRouter
from backend.output.readers.typed_values import JsonSchema
from backend.output.reply_format import OutputFormat
from backend.output.router import Router
from backend.output.ruled import RuledRouter
from backend.output.text import Automaton, Scanner


class StopMatcher:
    """Passes content until a stop string is complete; holds back text that may become one."""

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._scanner = Scanner(Automaton(stop_strings))

    def pass_text(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string followed it."""
        scan = self._scanner.scan(text)
        return scan.safe, bool(scan.match)

    def pass_last(self) -> str:
        """Return the text held back, because the content ends here or is interrupted."""
        return self._scanner.release()


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 16
# An unfinished code point has at most three bytes, and every token at least one.
_CONTEXT_TOKENS = 4


class Detokenizer(Protocol):
    """Converts the tokens of one reply to text."""

    def decode(self, token_id: int) -> str:
        """Return the text that this token makes certain; it may be empty."""

    def flush(self) -> str:
        """Return the text held back so far; an incomplete code point is dropped."""


class ByteDetokenizer:
    """For a tokenizer whose tokens are fixed bytes."""

    def __init__(self, pieces: Sequence[bytes], *, trims_leading_space: bool) -> None:
        """Begin a reply.

        Args:
            pieces: Token id to bytes; empty for hidden tokens.
            trims_leading_space: Whether a space at the very start is an artefact of the tokenizer.
        """
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._trims = trims_leading_space

    def decode(self, token_id: int) -> str:
        """Return the text that this token makes certain; empty for an unknown id."""
        if not 0 <= token_id < len(self._pieces):
            return ""
        text = self._decoder.decode(self._pieces[token_id]).replace(_REPLACEMENT, "")
        if self._trims and text:
            self._trims = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Drop an incomplete code point; nothing else is ever held back."""
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For a tokenizer that can only decode ids: decodes a sliding window of the latest ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Begin a reply; `decode` writes U+FFFD for incomplete characters."""
        self._decode = decode
        self._window: list[int] = []
        self._sent_chars = 0

    def decode(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        self._window.append(token_id)
        text = self._certain_text()
        fresh = text[self._sent_chars :]
        self._sent_chars = max(self._sent_chars, len(text))
        if len(self._window) == _WINDOW_TOKENS:
            del self._window[:-_CONTEXT_TOKENS]
            self._sent_chars = len(self._certain_text())
        return fresh.replace(_REPLACEMENT, "")

    def flush(self) -> str:
        """Drop an incomplete code point; nothing else is ever held back."""
        return ""

    def _certain_text(self) -> str:
        """Decode the window up to the point where its last code point may still change."""
        return self._decode(self._window).rstrip(_REPLACEMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpec:
    """The properties of a reply before it begins.

    Attributes:
        tools: Tools that may be called, with the JSON schemas of their arguments; without any,
            calls are content. `None` accepts any name.
        stop_strings: Content that ends the reply; never shown.
        prompt_tail: The end of the prompt, which determines the reply's first channel.
        max_calls: Ends the reply after this many calls; `None` means no limit.
        used_ids: The ids of all earlier calls of the conversation, which do not come again.
        is_ruled: Whether the caller's grammar rules the answer, which is then content to its end
            unless it begins with a call.
        triggers: Texts from which on it does; without any it rules the whole answer.
    """

    format: OutputFormat
    tools: Mapping[str, JsonSchema] | None = field(default_factory=dict)
    stop_strings: tuple[str, ...] = ()
    prompt_tail: str = ""
    wants_logprobs: bool = False
    max_calls: int | None = None
    used_ids: tuple[str, ...] = ()
    is_ruled: bool = False
    triggers: tuple[str, ...] = ()


class ReplyCursor:
    """Chains the detokenizer, the router and stop strings for one reply.

    The token that ends a reply by `stop`, whether a stop token or the last of a stop string, is
    neither counted nor included in the logprobs: a host that sees the limit reached takes it for
    the reason.
    """

    def __init__(
        self, spec: ReplySpec, detokenizer: Detokenizer, token_bytes: Callable[[int], bytes]
    ) -> None:
        """Begin a reply with a fresh detokenizer; `token_bytes` is for the logprobs."""
        self._spec = spec
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._router = _router(spec)
        self._stop = StopMatcher(spec.stop_strings) if spec.stop_strings else None
        self._passes_content = not spec.stop_strings and spec.max_calls is None
        self._deltas: list[Delta] = []
        self._logprobs: list[TokenLogprob] = []
        self._last_call = -1
        self._has_stopped = False
        self._is_finished = False
        self.completion_tokens = 0

    @property
    def completed_calls(self) -> Set[int]:
        """Indexes of the calls that were emitted in full."""
        return self._router.completed_calls

    @property
    def repairs(self) -> Mapping[int, tuple[str, ...]]:
        """Repairs made to calls, by call index."""
        return self._router.repairs

    def advance(self, steps: Steps) -> tuple[tuple[Delta, ...], Finish | None]:
        """Return the deltas of the steps, and the finish if the reply ends in them.

        Steps after the end are ignored.
        """
        if self._is_finished:
            return (), None
        self._take(steps)
        reason = FinishReason.STOP if self._has_stopped else steps.finish_reason
        finish = None if reason is None else self._finish(reason)
        deltas, self._deltas = self._deltas, []
        return tuple(deltas) if len(deltas) < 2 else _joined(deltas), finish

    def _take(self, steps: Steps) -> None:
        reason, token_ids = steps.finish_reason, steps.token_ids
        for position, token_id in enumerate(token_ids):
            if reason is FinishReason.STOP and position == len(token_ids) - 1:
                break
            match self._router.feed(self._detokenizer.decode(token_id)):
                case [ContentDelta() as content] if self._passes_content:
                    self._deltas.append(content)
                case deltas:
                    self._send(deltas)
            if self._has_stopped:
                return
            self.completion_tokens += 1
            if self._spec.wants_logprobs and position < len(steps.logprobs):
                self._logprobs.append(self._token_logprob(token_id, steps.logprobs[position]))
        if reason is not None:
            self._flush(truncated=reason is not FinishReason.STOP)

    def _send(self, deltas: Iterable[Delta]) -> None:
        limits_calls = self._spec.max_calls is not None
        for delta in deltas:
            if limits_calls and self._exceeds_calls(delta):
                self._has_stopped = True
            if self._has_stopped:
                return
            if isinstance(delta, ContentDelta):
                self._send_content(delta)
                continue
            self._release()
            if delta != ToolCallDelta(self._last_call):
                self._deltas.append(delta)
            if isinstance(delta, ToolCallDelta):
                self._last_call = delta.index
        if limits_calls and self._has_all_calls:
            self._has_stopped = True

    @property
    def _has_all_calls(self) -> bool:
        """Whether the last allowed call was sent in full."""
        limit = self._spec.max_calls
        if limit is None or self._last_call < limit - 1:
            return False
        return self._last_call in self._router.completed_calls

    def _exceeds_calls(self, delta: Delta) -> bool:
        """Tell whether a delta comes after the last allowed call."""
        is_of_last = isinstance(delta, ToolCallDelta) and delta.index == self._last_call
        return self._has_all_calls and not is_of_last

    def _send_content(self, delta: ContentDelta) -> None:
        if self._stop is None:
            self._deltas.append(delta)
            return
        text, self._has_stopped = self._stop.pass_text(delta.text)
        if text:
            self._deltas.append(ContentDelta(text))

    def _release(self) -> None:
        if self._stop is not None and (text := self._stop.pass_last()):
            self._deltas.append(ContentDelta(text))

    def _flush(self, *, truncated: bool) -> None:
        """Pass on the text held back by detokenizer, router and stop matcher, in this order."""
        self._send(self._router.feed(self._detokenizer.flush()))
        self._send(self._router.finish(truncated=truncated))
        if not self._has_stopped:
            self._release()

    def _finish(self, reason: FinishReason) -> Finish:
        self._is_finished = True
        is_cut_off = reason is FinishReason.LENGTH and self._router.ended_mid_call
        if self._has_called and not is_cut_off and reason is not FinishReason.CANCELLED:
            reason = FinishReason.TOOL_CALLS
        return Finish(reason, tuple(self._logprobs))

    @property
    def _has_called(self) -> bool:
        """Whether there are calls, all complete: no call may run without the others."""
        sent = set(range(self._last_call + 1))
        return bool(sent) and sent <= self._router.completed_calls

    def _token_logprob(self, token_id: int, logprobs: StepLogprobs) -> TokenLogprob:
        top = tuple(
            AlternativeLogprob(other, self._token_bytes(other), logprob)
            for other, logprob in logprobs.top
        )
        return TokenLogprob(token_id, self._token_bytes(token_id), logprobs.logprob, top)


def _router(spec: ReplySpec) -> Router | RuledRouter:
    citations = None if spec.is_ruled else spec.format.citations
    make: Callable[..., Router] = partial(CitedRouter, citations=citations) if citations else Router
    output_format = spec.format if spec.is_ruled else spec.format.with_bare_calls()
    router = make(
        output_format, tools=spec.tools, prompt_tail=spec.prompt_tail, used_ids=spec.used_ids
    )
    if not spec.is_ruled:
        return router
    may_call = spec.tools is None or bool(spec.tools)
    return RuledRouter(
        router, spec.format, spec.prompt_tail, may_call=may_call, triggers=spec.triggers
    )


def _joined(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    return tuple(_whole(list(group)) for _, group in groupby(deltas, key=_kind))


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else 0


def _whole(group: Sequence[Delta]) -> Delta:
    first = group[0]
    text = "".join(_text(delta) for delta in group)
    match first:
        case ContentDelta():
            return ContentDelta(text)
        case ReasoningDelta():
            return ReasoningDelta(text)
        case ToolCallDelta():
            return replace(first, call_id=_last_id(group), arguments=text)
        case _:
            assert_never(first)


def _last_id(group: Sequence[Delta]) -> str:
    """Return the id of a call from its pieces: the latest one wins."""
    ids = [delta.call_id for delta in group if isinstance(delta, ToolCallDelta) and delta.call_id]
    return ids[-1] if ids else ""


def _text(delta: Delta) -> str:
    return delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
