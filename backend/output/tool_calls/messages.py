"""Replies that are messages, each with a header that tells who it is for.

The wires of gpt-oss and of Muse. The router leaves the whole reply to the cursor.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeAlias

from backend.core.delta import ContentDelta, Delta, ReasoningDelta
from backend.output.automaton import Automaton, Scan, Scanner
from backend.output.code_span import CodeTracker
from backend.output.segment import TextAfterCall
from backend.output.tool_calls.markup import REFUTED, UNDECIDED
from backend.output.tool_calls.message_dialect import (
    MESSAGE,
    ROLE,
    START,
    Address,
    MessageDialect,
)
from backend.output.tool_calls.wire import WireContext, WireCursor, WireOutput

_Step: TypeAlias = Callable[[], None]


class MessageCursor:
    """Reads a whole reply, message by message.

    Text outside of messages is content. So is a message to a tool that was not offered, and
    any that is not what it should be. In Markdown code a special token is text, unless a
    message could not go on after it.
    """

    def __init__(self, context: WireContext, *, dialect: MessageDialect) -> None:
        self._context = context
        self._dialect = dialect
        self._raw: list[str] = []
        self._deltas: list[Delta] = []
        self._rest = ""
        self._header = ""
        self._ending = ""
        self._tool = ""
        self._wire: WireCursor | None = None
        self._space: TextAfterCall | None = None
        self._leave_message()
        self._resume(context.prompt_tail)

    @property
    def held(self) -> str:
        """Raw text since the last delta."""
        return "".join(self._raw)

    @property
    def is_mid_call(self) -> bool:
        """Whether a call or a header is open."""
        if self._wire is not None:
            return self._wire.is_mid_call
        return bool(self._tool) or self._step == self._in_header

    def feed(self, text: str) -> WireOutput:
        """Read on."""
        self._deltas = []
        self._rest = text
        self._read()
        if self._deltas:
            self._raw = [self._unsent()]
        else:
            self._raw.append(text)
        return WireOutput(tuple(self._deltas))

    def finish(self, *, truncated: bool) -> WireOutput:
        """End; a message needs no end token unless it is a call that was cut off."""
        self._deltas = []
        while self._step == self._in_header and not truncated:
            self._refuse_header(self._dialect.stray_text(self._header), "")
            self._read()
        if self._wire is not None:
            output = self._wire.finish(truncated=truncated)
            self._deltas += output.deltas
            self._say(output.rejected)
        elif self._step != self._in_header:
            self._say(self._scanner.finish())
            self._end_message(truncated=truncated)
        return WireOutput(tuple(self._deltas))

    def _read(self) -> None:
        while self._rest:
            self._step()

    def _unsent(self) -> str:
        wire = self._wire.held if self._wire else ""
        space = self._space.held if self._space else ""
        return space + self._header + self._ending + wire + self._scanner.held

    def _resume(self, prompt_tail: str) -> None:
        """Go on with the message that the prompt began: at least its role, most of the time."""
        start = prompt_tail.rfind(START)
        begun = prompt_tail[start + len(START) :] if start >= 0 else prompt_tail
        header, is_message, body = begun.partition(MESSAGE)
        if not is_message:
            self._begin_header(header if start >= 0 else ROLE)
        elif not any(end in body for end in self._dialect.ends):
            self._begin_body(self._dialect.read(header))
            if body.strip():
                self._go_on_with_text(TextAfterCall() if self._tool else None)

    def _begin_header(self, beginning: str) -> None:
        self._leave_message()
        self._header = beginning
        self._scanner = _scanner(self._dialect.tokens)
        self._step = self._in_header

    def _in_header(self) -> None:
        scan = self._scan()
        self._header += scan.safe
        header, token = self._header, scan.match
        if not self._dialect.may_be_header(header):
            self._refuse_header(self._dialect.text_behind(header), token)
        elif token == MESSAGE:
            self._begin_body(self._dialect.read(header))
        elif token in self._dialect.header_tokens:
            self._header += token
        elif token:
            self._refuse_header(self._dialect.stray_text(header), token)

    def _refuse_header(self, text: str, token: str) -> None:
        """Read what began like a header anew, as text, and go on with the token behind it."""
        self._rest = text + token + self._scanner.finish() + self._rest
        self._leave_message()

    def _begin_body(self, address: Address) -> None:
        self._header = ""
        self._is_outside = False
        self._is_thought = address.is_thought
        self._code = CodeTracker()
        offered = (name for name in address.tools if self._context.calls.is_offered(name))
        self._go_on_with_text(None)
        if self._dialect.make_call is not None and (tool := next(offered, "")):
            self._tool = tool
            self._space = TextAfterCall()
            self._step = self._before_arguments

    def _go_on_with_text(self, space: TextAfterCall | None) -> None:
        """Read the text of a body, or what stands outside of any message.

        Args:
            space: Holds back whitespace that is the frame's unless text follows.
        """
        self._space = space
        self._tool = ""
        self._has_text = False
        frames = self._dialect.tokens if self._is_outside else self._dialect.frames
        self._scanner = _scanner((*frames, *self._openers()))
        self._step = self._in_text

    def _leave_message(self) -> None:
        """Read what stands outside of any message."""
        self._header = ""
        self._is_outside = True
        self._is_thought = False
        self._code = CodeTracker()
        self._go_on_with_text(TextAfterCall())

    def _openers(self) -> tuple[str, ...]:
        expects_blocks = self._context.calls.expects_calls and not self._is_thought
        return self._dialect.call_openers if expects_blocks else ()

    def _in_text(self) -> None:
        scan = self._scan()
        self._say(scan.safe)
        self._meet(scan.match)

    def _meet(self, token: str) -> None:
        """Go where a token leads, unless it is text."""
        dialect = self._dialect
        if not token:
            return
        is_in_code = self._is_in_code()
        if token in dialect.ends:
            self._meet_end(token, is_in_code=is_in_code)
        elif is_in_code and (token in dialect.call_openers or not self._is_outside):
            self._say(token)
        elif token in dialect.call_openers and dialect.make_block is not None:
            self._open_wire(dialect.make_block(self._nested_context(token)))
        elif token == MESSAGE:
            self._begin_body(Address())
        else:
            self._begin_header(token.removeprefix(START))

    def _is_in_code(self) -> bool:
        self._code.settle()
        return self._code.is_open and not self._is_thought

    def _meet_end(self, token: str, *, is_in_code: bool) -> None:
        is_doubtful = is_in_code or token in self._dialect.last_ends
        if is_doubtful and self._has_text and not self._is_outside:
            self._ending = token
            self._step = partial(self._after_doubtful_end, token)
        else:
            self._end_message(truncated=False)

    def _after_doubtful_end(self, token: str) -> None:
        """Take an end token for one only if a message or nothing follows."""
        self._ending += self._rest
        self._rest = ""
        follows = self._dialect.frame_after(self._ending, len(token))
        if follows == UNDECIDED:
            return
        self._rest, self._ending = self._ending[len(token) :], ""
        self._step = self._in_text
        if follows == REFUTED:
            self._say(token)
        else:
            self._end_message(truncated=False)

    def _end_message(self, *, truncated: bool) -> None:
        """End a message; one to a tool, with nothing in it, is a call without arguments."""
        if self._tool and not truncated:
            calls = self._context.calls
            self._deltas += (calls.open(self._tool), calls.extend("{}"))
            calls.complete()
        self._leave_message()

    def _before_arguments(self) -> None:
        body = self._rest.lstrip()
        if body.startswith("{") and self._dialect.make_call is not None:
            self._open_wire(self._dialect.make_call(self._nested_context(""), self._tool))
            self._rest = body
        elif body:
            self._step = self._in_text
        else:
            self._say(self._rest)
            self._rest = ""

    def _nested_context(self, opener: str) -> WireContext:
        return WireContext(opener=opener, calls=self._context.calls, in_thought=False)

    def _open_wire(self, wire: WireCursor) -> None:
        self._go_on_with_text(TextAfterCall())
        self._wire = wire
        self._step = partial(self._in_wire, wire)

    def _in_wire(self, wire: WireCursor) -> None:
        output = wire.feed(self._rest)
        self._rest = output.rest or ""
        self._deltas += output.deltas
        if output.rest is not None:
            self._wire = None
            self._step = self._in_text
        self._say(output.rejected)

    def _scan(self) -> Scan:
        scan = self._scanner.feed(self._rest)
        self._rest = scan.rest
        return scan

    def _say(self, text: str) -> None:
        if text and self._space is not None:
            text = self._space.feed(text)
        if not text:
            return
        self._tool = ""
        self._has_text = True
        if self._is_thought:
            self._deltas.append(ReasoningDelta(text))
        else:
            self._code.feed(text)
            self._deltas.append(ContentDelta(text))


@lru_cache
def _automaton(texts: tuple[str, ...]) -> Automaton:
    return Automaton(texts)


def _scanner(texts: tuple[str, ...]) -> Scanner:
    return Scanner(_automaton(texts))
