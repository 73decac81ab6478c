"""Reads replies made of messages, each with a header that names its recipient.

For the formats of gpt-oss and Muse. The router leaves the whole reply to this reader.
"""

from functools import lru_cache, partial

from backend.core.delta import ContentDelta, ReasoningDelta
from backend.formats.code_span import CodeTracker
from backend.output.readers.calls.json_body import JsonBodyReader
from backend.output.readers.markup import REFUTED, UNDECIDED, after
from backend.output.readers.messages.frames import Address, MessageFrames
from backend.output.readers.reader import Reader, ReaderContext, ReaderOutput
from backend.output.readers.stepping_reader import Step, SteppingReader
from backend.output.text.automaton import Automaton
from backend.output.text.json_text import JsonText
from backend.output.text.segment import SENTENCE_ENDS, TextAfterCall

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
        return bool(self._tool) or self._step == self._in_header

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
            self._say("" if self._ending else self._buffer, 0)
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
        """Read the buffer again from its start."""
        position = 0
        while (end := self._step(position)) >= 0:
            position = end
        self._buffer = self._buffer[position:]

    def _before_call(self, position: int) -> int:
        """Read text outside messages."""
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

    def _begin_body(self, address: Address) -> None:
        self._header = ""
        self._is_outside = False
        self._is_thought = address.is_thought
        self._is_prose = address.is_prose
        self._code = CodeTracker()
        self._json = JsonText()
        offered = (name for name in address.tools if self._context.calls.is_offered(name))
        self._go_on_with_text(None)
        if self._frames.takes_bodies and (tool := next(offered, "")):
            self._tool = tool
            self._space = TextAfterCall()
            self._step = self._before_arguments

    def _go_on_with_text(self, space: TextAfterCall | None) -> None:
        """Read the text of a body, or text outside messages.

        Args:
            space: Holds back whitespace that belongs to the frame unless text follows.
        """
        self._space = space
        self._tool = ""
        self._has_text = False
        frames = self._frames
        ends = frames.tokens if self._is_outside else frames.frames
        self._automaton = _automaton((*ends, *self._openers()))
        self._step = self._in_text

    def _leave_message(self) -> None:
        """Read text outside messages."""
        self._header = ""
        self._is_outside = True
        self._is_thought = False
        self._is_prose = False
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
        is_in_code = self._is_in_code()
        if token in frames.ends:
            return self._meet_end(token, start, is_in_code=is_in_code)
        is_block = token in frames.call_openers and not is_in_code
        quoted = self._quoted_at(start) if is_block else REFUTED
        if quoted == UNDECIDED:
            return UNDECIDED
        if quoted >= 0 or (is_in_code and (token in frames.call_openers or not self._is_outside)):
            self._say(token, end)
        elif token in frames.call_openers and frames.make_block is not None:
            self._open_inner(frames.make_block(self._nested_context(token)))
        elif token == frames.message:
            self._begin_body(Address())
        else:
            self._begin_header(token.removeprefix(frames.start))
        return end

    def _quoted_at(self, start: int) -> int:
        """Look for text after a block of calls in prose, which makes it a quotation."""
        closer = self._frames.call_closer
        end = self._buffer.find(closer, start) + len(closer)
        if not (self._is_prose and self._has_text):
            return REFUTED
        if end < len(closer):
            return UNDECIDED
        follows = self._frames.frame_after(self._buffer, end)
        return UNDECIDED if follows == UNDECIDED else REFUTED if follows >= 0 else end

    def _is_in_code(self) -> bool:
        """Tell whether content ends in code, or in a string of JSON."""
        self._code.settle()
        return (self._code.is_open or self._json.is_in_string) and not self._is_thought

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
        start, frames = self._skip_space(position), self._frames
        if self._buffer.startswith("{", start):
            self._open_inner(JsonBodyReader(self._nested_context(""), self._tool, frames.frames))
            return start
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
            text = self._space.feed(text)
        if not text:
            return
        self._tool = ""
        self._has_text = True
        if self._is_thought:
            self._outbox.send(ReasoningDelta(text), end)
        else:
            self._last_char = text[-1]
            self._code.feed(text)
            self._json.feed(text)
            self._outbox.send(ContentDelta(text), end)


@lru_cache
def _automaton(texts: tuple[str, ...]) -> Automaton:
    return Automaton(texts)
