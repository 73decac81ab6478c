"""Reads replies made of messages, whose headers may name a tool."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial

from backend.core.step import ContentDelta, ReasoningDelta
from backend.formats.code_span import CodeTracker
from backend.formats.dialects import Messages
from backend.output.readers.json_calls import LISTED, JsonArguments
from backend.output.readers.patterns import (
    OPEN_MATCH,
    REFUTED,
    SPACE,
    UNDECIDED,
    Match,
    Pattern,
    after,
    after_space,
    choice,
    either,
    first_match,
    fixed,
    maybe,
    sequence,
    span_end,
)
from backend.output.readers.reader import (
    MakeReader,
    NotACallError,
    Reader,
    ReaderContext,
    ReaderOutput,
    Step,
    SteppingReader,
    offered_name,
)
from backend.output.readers.tolerant_json import NULLS, ODD_QUOTES, NotJsonError, read_json
from backend.output.text import SENTENCE_ENDS, Automaton, JsonText, TextAfterCall

_SUPERFLUOUS = re.compile(r"[\s\]}`]*")
# Arguments, or none in another spelling; a fence around them belongs to the frame.
_FENCE = sequence(fixed("```"), maybe(fixed("json")), SPACE, fixed("{"))
_OBJECTS = ("{", '"{', '"\\"{', '""', *NULLS, *(f'"{word}"' for word in NULLS))
_BODY = choice(*map(fixed, _OBJECTS), LISTED, _FENCE)
_BODY_BEGIN, _BEGUN_BODY = re.compile(_BODY.whole), re.compile(_BODY.begun)


class _JsonBodyReader(SteppingReader):
    """Reads the arguments from their first brace on.

    Their last brace is emitted with the text after it, or at the end of the reply.
    """

    def __init__(self, context: ReaderContext, name: str, ends: tuple[str, ...] = ()) -> None:
        """Begin a body; damaged arguments are collected up to one of `ends`."""
        super().__init__(context, opener_is_call=False)
        self._ends = ends
        self._body = ""
        self._name = name
        self._arguments = JsonArguments(ends)

    @property
    def is_mid_call(self) -> bool:
        """Whether the call is open, which it is until some text follows it."""
        return True

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; complete arguments then make a call, unless cut off from an end token."""
        if truncated:
            return ReaderOutput()
        self._begin("")
        self._arguments.finish()
        body = self._body + self._buffer
        if not self._arguments.is_whole and self._repair(body, is_last=True):
            return ReaderOutput(self._outbox.end(""))
        if not self._arguments.is_whole:
            # The held text of a begun call is a piece of its arguments.
            held = "" if self._calls_begun else self.held
            return ReaderOutput(self._outbox.end(""), rejected=held)
        self._complete(0)
        return ReaderOutput(self._outbox.end(""))

    def _before_call(self, position: int) -> int:
        self._step = self._in_arguments
        return position

    def _in_arguments(self, position: int) -> int:
        if position == len(self._buffer):
            return UNDECIDED
        piece, end = self._arguments.read_from(self._buffer, position)
        self._body += self._buffer[position:end]
        self._hand_out(piece, end - self._arguments.kept_back)
        if self._arguments.is_malformed:
            self._step = self._in_damage
            return end
        if self._arguments.is_whole:
            self._step = self._after_arguments
        return end

    def _in_damage(self, position: int) -> int:
        """Collect a body that is not JSON, to read it again."""
        text = self._buffer[position:]
        found = [place for end in self._ends if (place := text.find(end)) >= 0]
        if not found:
            # The text may end with the beginning of an end.
            settled = max(len(text) - max(map(len, self._ends), default=0), 0)
            self._body += text[:settled]
            return position + settled if settled else UNDECIDED
        self._body += text[: min(found)]
        if not self._repair(self._body):
            raise NotACallError(position)
        self._is_over = True
        return position + min(found)

    def _repair(self, body: str, *, is_last: bool = False) -> bool:
        """Emit the arguments found in a damaged body, if any."""
        for end in self._ends:
            body = body.rstrip().removesuffix(end)
        try:
            found = read_json(body, 0, ODD_QUOTES)
        except NotJsonError:
            return False
        calls = self._context.calls
        if not found.text.startswith("{"):
            return False
        if is_last and found.is_open and calls.lacks_arguments(self._name, found.text):
            return False
        if not self._calls_begun:
            self._begin_call(self._name, 0)
        delta = calls.settle(found.text)
        if delta is None:
            return False
        self._outbox.send(delta, 0)
        calls.complete(*found.reasons)
        self._calls_ended += 1
        return True

    def _after_arguments(self, position: int) -> int:
        """Skip whitespace and superfluous brackets."""
        end = span_end(_SUPERFLUOUS, self._buffer, position)
        if end < len(self._buffer):
            if (follows := self._end_at(end)) == UNDECIDED:
                return UNDECIDED
            if follows == REFUTED and self._body.startswith(NULLS):
                # The word began a sentence.
                raise NotACallError(position)
            self._complete(end)
            self._is_over = True
            return end
        return end if end > position else UNDECIDED

    def _end_at(self, position: int) -> int:
        return either(*(after(self._buffer, position, mark) for mark in self._ends))

    def _hand_out(self, piece: str, end: int) -> None:
        if piece and not self._calls_begun:
            self._begin_call(self._name, end)
        self._send(piece, end)

    def _complete(self, end: int) -> None:
        if not self._calls_begun:
            self._begin_call(self._name, end)
        self._missing_end = self._arguments.missing_end
        self._end_call(end)


_MAX_HEADER_CHARS = 256
_MAX_HEADER_WORDS = 4
_LIKENESS = 0.8
_TO = "to="
_RECIPIENT = re.compile(r"to=[\w.-]*", re.ASCII)
_RECIPIENTS = re.compile(r"\bto=\s*([^\s<]+)")


@dataclass(frozen=True, slots=True)
class _Address:
    """The recipient of a message: the user, unless it is a thought or names a tool.

    Attributes:
        is_prose: Whether the user is the recipient: a call between text is a quotation there.
        takes_call: Whether a tool is the recipient, where calls have openers.
        tools: Possible names of the tool, most likely first.
    """

    is_thought: bool = False
    is_prose: bool = False
    takes_call: bool = False
    tools: tuple[str, ...] = ()


class MessageFrames:
    """The frames of one dialect of messages."""

    def __init__(
        self,
        messages: Messages,
        make_block: MakeReader | None,
        warn: Callable[[str], None],
        call_heads: tuple[Pattern | None, ...] = (),
    ) -> None:
        """Compile the patterns.

        Args:
            make_block: Reads calls inside a body, if calls have openers.
            call_heads: The beginnings of these calls.
        """
        self._messages = messages
        self._warn = warn
        self._call_heads = call_heads
        self._channel = re.compile(re.escape(messages.channel) + r"[^\w<]*(\w*)")
        self.make_block = make_block
        self.start, self.message = messages.start, messages.message
        self.tokens, self.ends = messages.tokens, messages.ends
        self.header_tokens, self.last_ends = messages.header_tokens, messages.last_ends
        self.role = messages.roles[0]
        self.call_openers = messages.calls.openers if messages.calls else ()
        self.call_closer = messages.calls.end if messages.calls else ""
        self.frames = (
            *(messages.start + role for role in messages.roles),
            *(messages.channel + name for name in messages.channels),
            *messages.ends,
        )
        self._words_known = messages.words | {*messages.channels}

    @property
    def takes_bodies(self) -> bool:
        """Whether the body of a message to a tool is its arguments in JSON."""
        return self.make_block is None

    def read(self, header: str) -> _Address:
        """Return the recipient named in a header; the last known one of the channels counts."""
        messages = self._messages
        recipients = [name for name in _RECIPIENTS.findall(header) if name not in messages.people]
        if not self.takes_bodies:
            is_prose = any(name in messages.people for name in _RECIPIENTS.findall(header))
            is_thought = messages.self_name in recipients
            takes_call = bool(recipients) and not (is_thought or is_prose)
            return _Address(is_thought, is_prose, takes_call)
        if recipients:
            name = recipients[-1]
            return _Address(tools=(name.removeprefix(messages.namespace), name))
        channels = self._channel.findall(header) or self._bare_channels(header)
        close = (get_close_matches(name, messages.channels, 1, _LIKENESS) for name in channels)
        known = [names[0] for names in close if names]
        if channels and not known:
            self._warn(f"unknown channel {channels[0][:32]!r}: its text passes as content")
        return _Address(is_thought=bool(known) and messages.channels[known[-1]])

    def _bare_channels(self, header: str) -> list[str]:
        """Return the channel of a header that lacks the token before it."""
        word = header.removeprefix(self.role).strip().partition(" ")[0]
        return [word] if word in self._messages.channels else []

    def salvaged(self, header: str) -> tuple[_Address, str] | None:
        """Return the recipient and the text of a header that runs into its text."""
        messages = self._messages
        before, brace, body = header.partition("{")
        is_header = brace and self.takes_bodies and self.may_be_header(before)
        if is_header and (address := self.read(before)).tools:
            return address, brace + body
        _, token, rest = header.rpartition(messages.channel or "\0")
        name = rest.split(maxsplit=1)[0] if rest.strip() else ""
        if not token or name not in messages.channels:
            return None
        return _Address(is_thought=messages.channels[name]), rest.partition(name)[2].lstrip()

    def is_role(self, text: str) -> bool:
        """Tell whether text outside messages is, or may become, the role of the next one."""
        return bool(text.strip()) and self.role.startswith(text.strip())

    def may_be_header(self, beginning: str) -> bool:
        """Tell whether a header may begin like this; if not, no longer text may either."""
        after_role = beginning.removeprefix(self.role)
        is_role_alone = after_role == beginning or not after_role[:1].strip()
        channel = after_role.partition(" ")[0].partition(_TO)[0]
        is_channel = any(name.startswith(channel) for name in self._messages.channels)
        if not (is_role_alone or is_channel or after_role.startswith(self.header_tokens)):
            return False
        words = [word for word in self._words(beginning) if not _may_be_recipient(word)]
        return len(beginning) <= _MAX_HEADER_CHARS and len(words) <= _MAX_HEADER_WORDS

    def stray_text(self, header: str) -> str:
        """Return the text of a header without a message, if it is more than a header."""
        words = self._words(header.removeprefix(self.role))
        is_known = all(word in self._words_known or _RECIPIENT.fullmatch(word) for word in words)
        return "" if is_known else self.text_of(header)

    def text_of(self, header: str) -> str:
        """Return the text of an invalid header without its role or its first token."""
        text = header.removeprefix(self.role)
        first = next(filter(text.startswith, self.header_tokens), "")
        return text.removeprefix(first)

    def frame_after(self, text: str, position: int) -> int:
        """Return the end of a frame that follows a position, ignoring whitespace."""
        begin = after_space(text, position)
        found = (after(text, begin, frame) for frame in self.frames)
        return begin if begin < 0 else either(*found)

    def call_at(self, text: str, start: int, opener: str) -> Match:
        """Match the beginning of a call at its opener, or after that of its block."""
        inside = after_space(text, start + len(opener))
        own = first_match(text, start, *self._call_heads)
        if own.end != REFUTED or inside < 0:
            return own if own.end != REFUTED else OPEN_MATCH
        return first_match(text, inside, *self._call_heads)

    def _words(self, header: str) -> list[str]:
        for token in self.header_tokens:
            header = header.replace(token, " ")
        return header.split()


def _may_be_recipient(beginning: str) -> bool:
    return beginning.startswith(_TO) or _TO.startswith(beginning)


_TAG_END = "</"


class MessageReader(SteppingReader):
    """Reads a whole reply, message by message.

    Text outside messages is content. So are messages to tools that were not offered, and malformed
    messages. In Markdown code a special token is text, unless a message could not continue after
    it.
    """

    def __init__(self, context: ReaderContext, *, frames: MessageFrames) -> None:
        super().__init__(context, opener_is_call=False)
        self._frames = frames
        self._header = ""
        self._ending = ""
        self._last_char = ""
        self._tool = ""
        self._inner: Reader | None = None
        self._space: TextAfterCall | None = None
        self._leave_message()
        self._resume(context.prompt_tail)

    @property
    def is_mid_call(self) -> bool:
        """Whether a call or a header is open."""
        if self._inner is not None:
            return self._inner.is_mid_call
        return bool(self._tool) or self._awaits_call or self._step == self._in_header

    def finish(self, *, truncated: bool) -> ReaderOutput:
        """End; a message needs no end token, except for a call that was cut off."""
        self._begin("")
        while self._step == self._in_header and not truncated:
            self._refuse_header(self._frames.stray_text(self._header + self._buffer), 0)
            self._read_on()
        if self._inner is not None:
            output = self._inner.finish(truncated=truncated)
            for delta in output.deltas:
                self._outbox.send(delta, 0)
            self._say(output.rejected, 0)
        elif self._step != self._in_header and self._buffer.startswith(self._frames.call_openers):
            return ReaderOutput(self._outbox.end("")) if truncated else self._end_in_block()
        elif self._step != self._in_header:
            is_begun = self._awaits_call or self._step == self._before_arguments
            is_markup = self._ending or (truncated and is_begun)
            self._say("" if is_markup else self._buffer, 0)
            is_short = bool(self._tool) and self._lacks_arguments(self._tool)
            self._end_message(truncated=truncated or is_short)
        return ReaderOutput(self._outbox.end(""))

    def _end_in_block(self) -> ReaderOutput:
        """End after a block of calls in prose: nothing followed it, so it is not a quotation."""
        if _TAG_END not in self._buffer:
            # A call that is just opened is a word of a sentence.
            self._say(self._buffer, 0)
            return ReaderOutput(self._outbox.end(""))
        self._has_text = False
        self._read_on()
        inner = self._inner
        output = inner.finish(truncated=False) if inner else ReaderOutput(rejected=self._buffer)
        for delta in output.deltas:
            self._outbox.send(delta, 0)
        self._say(output.rejected, 0)
        return ReaderOutput(self._outbox.end(""))

    def _read_on(self) -> None:
        position = 0
        while (end := self._step(position)) >= 0:
            position = end
        self._buffer = self._buffer[position:]

    def _before_call(self, position: int) -> int:
        return self._in_text(position)

    def _resume(self, prompt_tail: str) -> None:
        """Continue the message that the prompt began; usually the prompt has at least its role."""
        frames = self._frames
        start = prompt_tail.rfind(frames.start)
        begun = prompt_tail[start + len(frames.start) :] if start >= 0 else prompt_tail
        header, is_message, body = begun.partition(frames.message)
        if not is_message:
            self._begin_header(header if start >= 0 else frames.role)
        elif not any(end in body for end in frames.ends):
            self._begin_body(frames.read(header))
            if body.strip():
                self._go_on_with_text(TextAfterCall() if self._tool else None)

    def _begin_header(self, beginning: str) -> None:
        self._leave_message()
        self._header = beginning
        self._automaton = _automaton(self._frames.tokens)
        self._step = self._in_header

    def _in_header(self, position: int) -> int:
        frames = self._frames
        start, token = self._automaton.find(self._buffer, position)
        self._header += self._buffer[position:start]
        end = start + len(token)
        if not frames.may_be_header(self._header):
            return self._refuse_header(frames.text_of(self._header), start)
        if token == frames.message:
            self._begin_body(frames.read(self._header))
            self._step = partial(self._at_body, self._step)
        elif token in frames.header_tokens:
            self._header += token
        elif token:
            return self._refuse_header(frames.stray_text(self._header), start)
        return end if end > position else UNDECIDED

    def _at_body(self, step: Step, position: int) -> int:
        """Skip a repeated end of a header, and continue with the body."""
        end = after(self._buffer, position, self._frames.message)
        if end != REFUTED:
            return end
        self._step = step
        return position

    def _refuse_header(self, text: str, end: int) -> int:
        """Reread text that began like a header, and continue after it."""
        found = self._frames.salvaged(self._header)
        if found is not None:
            address, text = found
            self._unread(text, 0, end)
            self._begin_body(address)
            return 0
        self._unread(text, 0, end)
        self._leave_message()
        return 0

    def _unread(self, text: str, start: int, end: int) -> None:
        """Replace a text by another, to be reread."""
        self._buffer = self._buffer[:start] + text + self._buffer[end:]
        self._outbox.move(len(text) - (end - start))

    def _begin_body(self, address: _Address) -> None:
        self._header = ""
        self._is_outside = False
        self._is_thought = address.is_thought
        self._is_prose = address.is_prose
        self._awaits_call = address.takes_call
        self._code = CodeTracker()
        self._json = JsonText()
        offered = (name for name in address.tools if self._context.calls.is_offered(name))
        self._go_on_with_text(None)
        if self._frames.takes_bodies and (tool := next(offered, "")):
            self._tool = tool
            self._space = TextAfterCall()
            self._step = self._before_arguments

    def _go_on_with_text(self, space: TextAfterCall | None) -> None:
        """Read text in or outside messages; `space` holds back the frame's whitespace."""
        self._space = space
        self._tool = ""
        self._has_text = False
        frames = self._frames
        ends = frames.tokens if self._is_outside else frames.frames
        self._automaton = _automaton((*ends, *self._openers()))
        self._step = self._in_text

    def _leave_message(self) -> None:
        self._header = ""
        self._is_outside = True
        self._is_thought = False
        self._is_prose = self._awaits_call = False
        self._code = CodeTracker()
        self._json = JsonText()
        self._go_on_with_text(TextAfterCall())

    def _openers(self) -> tuple[str, ...]:
        expects_blocks = self._context.calls.expects_calls and not self._is_thought
        return self._frames.call_openers if expects_blocks else ()

    def _in_text(self, position: int) -> int:
        start, token = self._automaton.find(self._buffer, position)
        text = self._buffer[position:start]
        if self._is_outside and not self._has_text and self._frames.is_role(text):
            if not token:
                return UNDECIDED
            # The role of a message whose start is missing.
            text = ""
        self._say(text, start)
        end = self._meet(token, start) if token else UNDECIDED
        return start if end == UNDECIDED and start > position else end

    def _meet(self, token: str, start: int) -> int:
        """Follow a token, unless it is text."""
        frames = self._frames
        end = start + len(token)
        is_in_code = self._is_in_code(token)
        if token in frames.ends:
            return self._meet_end(token, start, is_in_code=is_in_code)
        is_block = token in frames.call_openers and not is_in_code
        quoted = self._quoted_at(start, token) if is_block else REFUTED
        if quoted == UNDECIDED:
            return UNDECIDED
        if quoted >= 0 or (is_in_code and (token in frames.call_openers or not self._is_outside)):
            self._say(token, end)
        elif token in frames.call_openers and frames.make_block is not None:
            self._open_inner(frames.make_block(self._nested_context(token)))
        elif token == frames.message:
            self._begin_body(_Address())
        else:
            self._begin_header(token.removeprefix(frames.start))
        return end

    def _quoted_at(self, start: int, opener: str) -> int:
        """Look for text after a block of calls in prose, which makes it a quotation.

        So is an opener that no call of an offered tool follows.
        """
        if not (self._is_prose and self._has_text):
            return REFUTED
        call = self._frames.call_at(self._buffer, start, opener)
        if call.end < 0 or not offered_name(call.name, self._context.calls):
            return UNDECIDED if call.end == UNDECIDED else start + len(opener)
        closer = self._frames.call_closer
        end = self._buffer.find(closer, start) + len(closer)
        if end < len(closer):
            return UNDECIDED
        follows = self._frames.frame_after(self._buffer, end)
        return UNDECIDED if follows == UNDECIDED else REFUTED if follows >= 0 else end

    def _is_in_code(self, token: str) -> bool:
        """Tell whether a token here is in code, or in a string of JSON."""
        self._code.settle()
        return (self._code.quotes(token) or self._json.is_in_string) and not self._is_thought

    @property
    def _is_within_line(self) -> bool:
        """Whether a line of content has text, and does not end with a word or a sentence."""
        is_glued = self._last_char.isalnum() or self._last_char in SENTENCE_ENDS
        return not (self._code.begins_line or is_glued or self._is_thought)

    def _meet_end(self, token: str, start: int, *, is_in_code: bool) -> int:
        """Accept a doubtful end token only if a message or nothing follows."""
        is_doubtful = is_in_code or token in self._frames.last_ends or self._is_within_line
        end = start + len(token)
        if is_doubtful and self._has_text and not self._is_outside:
            follows = self._frames.frame_after(self._buffer, end)
            if follows == UNDECIDED:
                self._ending = token
                self._step = partial(self._at_doubtful_end, is_in_code=is_in_code)
                return start
            if follows == REFUTED:
                self._say(token, end)
                return end
        self._end_message(truncated=False)
        return end

    def _at_doubtful_end(self, position: int, *, is_in_code: bool) -> int:
        token = self._ending
        if self._frames.frame_after(self._buffer, position + len(token)) == UNDECIDED:
            return UNDECIDED
        self._ending = ""
        self._step = self._in_text
        return self._meet_end(token, position, is_in_code=is_in_code)

    def _end_message(self, *, truncated: bool) -> None:
        """End a message; an empty one to a tool is a call without arguments."""
        if self._tool and not truncated:
            self._begin_call(self._tool, 0)
            self._end_call(0)
        self._leave_message()

    def _before_arguments(self, position: int) -> int:
        start = self._skip_space(position)
        if found := _BODY_BEGIN.match(self._buffer, start):
            fence = found[0][:-1] if found[0].startswith("`") else ""
            context = self._nested_context(fence)
            self._open_inner(_JsonBodyReader(context, self._tool, self._frames.frames))
            return start + len(fence)
        if start < len(self._buffer) and _BEGUN_BODY.fullmatch(self._buffer, start):
            return UNDECIDED
        if start < len(self._buffer):
            self._step = self._in_text
            return position
        self._say(self._buffer[position:], start)
        return start if start > position else UNDECIDED

    def _nested_context(self, opener: str) -> ReaderContext:
        return ReaderContext(opener=opener, calls=self._context.calls, in_thought=False)

    def _open_inner(self, inner: Reader) -> None:
        self._go_on_with_text(TextAfterCall())
        self._inner = inner
        self._awaits_call = False
        self._step = partial(self._in_inner, inner)

    def _in_inner(self, inner: Reader, position: int) -> int:
        """Pass the text to a reader of calls until they end."""
        if position == len(self._buffer):
            return UNDECIDED
        output = inner.feed(self._buffer[position:])
        end = len(self._buffer)
        if output.rest is not None:
            self._inner = None
            self._step = self._in_text
            self._unread(output.rest, position, end)
            end = position
        for delta in output.deltas:
            self._outbox.send(delta, end - len(self._inner.held if self._inner else ""))
        self._say(output.rejected, end)
        return end

    def _say(self, text: str, end: int) -> None:
        if text and self._space is not None:
            text = self._space.pass_text(text)
        if not text:
            return
        self._tool = ""
        self._has_text = True
        self._awaits_call = False
        if self._is_thought:
            self._outbox.send(ReasoningDelta(text), end)
        else:
            self._last_char = text[-1]
            self._code.follow(text)
            self._json.follow(text)
            self._outbox.send(ContentDelta(text), end)


@lru_cache
def _automaton(texts: tuple[str, ...]) -> Automaton:
    return Automaton(texts)
