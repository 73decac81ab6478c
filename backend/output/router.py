"""Routes the text of a reply to content, thoughts and calls; a damaged block of calls is reread."""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Set
from functools import lru_cache, partial
from traceback import format_tb
from typing import Self

from backend.core.step import ContentDelta, Delta, ReasoningDelta
from backend.formats.code_span import CallFence, CodeTracker
from backend.formats.format import ToolFormat
from backend.output.block import Block, Quotation
from backend.output.readers.build import make_reader
from backend.output.readers.reader import (
    USUAL_NAMESPACES,
    CallLedger,
    Reader,
    ReaderContext,
    ReaderOutput,
    ids_of,
)
from backend.output.readers.typed_values import JsonSchema
from backend.output.reply_format import OutputFormat, opens_in_header, opens_in_reasoning
from backend.output.text import (
    SENTENCE_ENDS,
    STOPS,
    Automaton,
    FirstText,
    InnerTags,
    JsonText,
    Scanner,
    Segment,
    StrayMark,
    TextAfterCall,
    TextAfterThought,
    ThoughtText,
)

_BEGUN_TOKEN = re.compile(r"\s*<[|｜]\w[^<>]*")

# So close to the end of repeated openers each is read as one.
_NEAR_CHARS = 400

# Text is read again at each marker in it, so it comes in short pieces.
_PIECE_CHARS = 1 << 10

log = logging.getLogger(__name__)


class Router:
    """Routes the text of one reply, regardless of how the text is split.

    All text except markers is emitted in order, without the whitespace that belongs to markers
    (see `segment`). A superfluous marker directly after a call is ignored. A marker in Markdown
    code is text: models quote, especially when asked about tool calls. But a fenced block without
    prose before it is a call wrapped by the model, not a quotation; so is a block that never
    ends.

    If a reader raises, routing ends: the text held back and the rest of the reply become
    content.

    Attributes:
        ended_mid_call: Whether the reply ended inside a call.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        tools: Mapping[str, JsonSchema] | None,
        prompt_tail: str = "",
        used_ids: Collection[str] = (),
        make_reader: Callable[[ToolFormat, ReaderContext], Reader] = make_reader,
    ) -> None:
        """Begin a reply; `tools` of `None` accepts any name, and without any, calls are content."""
        self._format = output_format
        self._tools = tools
        self._prompt_tail = prompt_tail
        self._calls = CallLedger(tools, ids_of(output_format.tools, used_ids))
        self._make_reader = partial(make_reader, output_format.tools)
        self._leads = _leads(output_format.tools, tools)
        ends = (*output_format.tools.closers, *output_format.tools.leaks)
        self._leavable = (*ends, *output_format.tools.inner_ends)
        self._scanner = Scanner(_automaton(self._markers()))
        self._lacks_closer = False
        self._in_thought = opens_in_reasoning(output_format, prompt_tail)
        first: Segment = TextAfterThought() if opens_in_header(prompt_tail) else FirstText()
        self._segment = ThoughtText() if self._in_thought else first
        self._code = CodeTracker()
        self._json = JsonText()
        # Content that the two have not read: only marks and quotations ask them.
        self._unread: list[str] = []
        self._stray = StrayMark()
        may_fence = self._calls.expects_calls and not output_format.tools.owns_reply
        self._fence = CallFence() if may_fence else None
        self._last_char = ""
        self._follows_frame = False
        self._is_framed = False
        self._inner = InnerTags(output_format.reasoning.frames)
        self._quotes_thoughts = False
        self._shows_call = False
        self._quotation: Quotation | None = None
        self._quoting_fence = 0
        self._may_draft = output_format.tools.has_drafts
        # The end of a closed thought, from a draft on, and its place among the deltas.
        self._last_draft = ""
        self._draft_place = 0
        self._unquotable = frozenset(() if output_format.tools.is_quotable else self._own_marks())
        self._is_to_be_owned = output_format.tools.owns_reply
        self._block: Block | None = None
        # That of the last sound block between markers.
        self._block_text = ""
        # Number of the next openers, which repeat one that began no call.
        self._refused = 0
        self._rest = ""
        self._deltas: list[Delta] = []
        self._is_off = False
        self.ended_mid_call = False

    @property
    def completed_calls(self) -> Set[int]:
        """Indexes of the calls that were emitted in full."""
        return self._calls.completed

    @property
    def repairs(self) -> Mapping[int, tuple[str, ...]]:
        """Repairs made to calls, by call index."""
        return self._calls.repairs

    @property
    def held(self) -> str:
        """Text that would be content if routing ended here; not whitespace around a thought."""
        if self._in_thought:
            return ""
        waiting = self._block.held if self._block else self._scanner.held
        quoted = self._quotation.text if self._quotation else ""
        fence = self._fence.held if self._fence else ""
        return fence + self._segment.held + self._stray.text + quoted + waiting

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that this text makes certain."""
        self._rest += text
        return self._guarded(self._route)

    def finish(self, *, truncated: bool) -> list[Delta]:
        """Return the deltas that were held back; an open call of a truncated reply just ends."""
        return self._guarded(lambda: self._finish(truncated=truncated))

    def _finish(self, *, truncated: bool) -> None:
        self._end(truncated=truncated)
        if self._fence:
            self._pass(self._fence.pass_last(truncated=truncated))
        if self._last_draft and not truncated and len(self._deltas) == self._draft_place:
            self._call_draft()
        self._release_draft()

    def _guarded(self, route: Callable[[], None]) -> list[Delta]:
        try:
            if not self._is_off:
                route()
        except Exception as error:  # noqa: BLE001 (a bug in a parser must not cost the reply)
            # Log no message: it may quote the reply.
            place = "".join(format_tb(error.__traceback__))
            name = type(error).__name__
            log.error("routing failed: the rest of this reply is content: %s\n%s", name, place)
            self._switch_off()
        if self._is_off and self._rest:
            self._deltas.append(ContentDelta(self._rest))
            self._rest = ""
        if len(self._deltas) > self._draft_place:
            self._release_draft()
        deltas, self._deltas = self._deltas, []
        self._draft_place = 0
        return deltas

    def _switch_off(self) -> None:
        """Treat everything held back as content to come."""
        held = self._block.held if self._block else self._unscanned()
        quoted = self._quotation.text if self._quotation else ""
        fence = self._fence.held if self._fence else ""
        self._rest = fence + self._segment.held + self._stray.text + quoted + held + self._rest
        self._is_off = True

    def _route(self) -> None:
        if self._is_to_be_owned:
            self._is_to_be_owned = False
            self._open_block("")
        later: list[str] = []
        try:
            while self._rest or later:
                self._rest = self._rest or later.pop()
                if len(self._rest) > _PIECE_CHARS:
                    later.append(self._rest[_PIECE_CHARS:])
                    self._rest = self._rest[:_PIECE_CHARS]
                self._route_piece()
        finally:
            self._rest += "".join(reversed(later))

    def _route_piece(self) -> None:
        if self._block is not None:
            self._apply(self._block.feed(self._rest), self._block)
        elif self._quotation is not None and not self._quotation.is_call:
            self._try_quotation(self._quotation)
        else:
            self._scan()

    def _scan(self) -> None:
        scan = self._scanner.scan(self._rest)
        self._rest = scan.match + scan.rest
        if scan.safe:
            self._emit(scan.safe)
        if scan.match:
            self._enter(scan.match)
        self._rest = scan.rest

    def _end(self, *, truncated: bool) -> None:
        while self._has_more(truncated=truncated):
            pass

    def _has_more(self, *, truncated: bool) -> bool:
        """End the open quotation or block, and tell whether that leaves text to route."""
        self._route()
        if self._quotation is not None and self._in_thought:
            self._end_draft(self._quotation, truncated=truncated)
        elif self._quotation is not None:
            self._end_quotation(self._quotation, truncated=truncated)
        if self._block is None:
            return self._flush(truncated=truncated)
        self.ended_mid_call = self._block.is_mid_call
        return self._end_block(self._block, truncated=truncated)

    def _flush(self, *, truncated: bool) -> bool:
        match, rest = self._scanner.match, self._scanner.release()
        if match:
            reasoning = self._format.reasoning
            is_begun_end = match in reasoning.frames and reasoning.end.startswith(match)
            if not (self._in_thought and is_begun_end):
                self._enter(match)
            # The text after a marker is the beginning of a longer one; but a lead may be text.
            is_text = match in self._leads and self._block is None
            self._rest = rest if is_text or not truncated else ""
            return True
        self._settle()
        if _BEGUN_TOKEN.fullmatch(rest) and self._may_end_line:
            # Nothing but a special token begins like this, unless a sentence names it.
            rest = ""
        if truncated:
            # The text after a stray mark is the beginning of another one, or of text around it.
            rest = self._without_begun_marker(rest)
        if truncated or self._is_framed:
            self._stray.drop()
        self._emit(rest)
        self._send(self._segment.pass_text(self._stray.pass_last()))
        self._send(self._segment.pass_last())
        return False

    def _without_begun_marker(self, rest: str) -> str:
        """Return the last text of a cut-off reply, where it may begin another marker.

        It does after a special token, and right after a call unless it is a word, which may be
        the name of a tool in formats that begin calls with it.
        """
        if rest.startswith((*self._format.reasoning.tokens, *self._format.tools.tokens)):
            return ""
        begun, tools = rest.strip(), self._format.tools
        names = self._leads if tools.name_lead in tools.openers else ()
        is_name = bool(begun) and any(lead.startswith(begun) for lead in names)
        if not (begun and self._is_after_call) or (begun[0].isalnum() and not is_name):
            return rest
        if is_name or any(opener.startswith(rest) for opener in tools.openers):
            self.ended_mid_call = True
        return ""

    def _unscanned(self) -> str:
        return self._scanner.match + self._scanner.release()

    def _end_block(self, block: Block, *, truncated: bool) -> bool:
        output = block.finish(truncated=truncated)
        text = (output.rejected + (output.rest or "")).strip()
        is_stray = text in self._format.tools.openers and self._is_after_call
        self._apply(ReaderOutput(output.deltas) if is_stray else output, block)
        if self._rest:
            self._block = None
        return bool(self._rest)

    def _apply(self, output: ReaderOutput, block: Block) -> None:
        self._rest = output.rest or ""
        if output.deltas and self._fence:
            self._pass(self._fence.enter_call())
        if output.deltas or block.is_empty:
            self._begin(TextAfterCall())
            self._deltas += output.deltas
        if output.rejected:
            self._emit_marker(output.rejected)
        if output.is_damaged and block.is_repaired:
            # The closers of a damaged call are meaningless too.
            self._begin(TextAfterCall())
        if output.rest is not None:
            if not block.is_empty:
                is_marked = block.opener in self._format.tools.openers
                self._block_text = block.text_before(output.rest) if is_marked else ""
            self._lacks_closer = output.is_damaged if block.has_calls else self._lacks_closer
            is_refused = bool(output.rejected) and output.rejected.strip() == block.opener.strip()
            self._refused = _repetitions(block.opener, output.rest) if is_refused else 0
            self._block = None

    def _enter(self, marker: str) -> None:
        """Follow a marker; some are dropped, some are text after all."""
        reasoning = self._format.reasoning
        self._read_content()
        if self._json.is_in_string and not self._in_thought:
            self._emit(marker)
        elif not self._in_thought and self._inner.has(marker, is_first=self._segment.is_blank):
            self._enter_inner(marker)
        elif self._is_in_code(marker):
            self._enter_in_code(marker)
        elif marker in reasoning.ends:
            self._enter_end(marker)
        elif marker in (*reasoning.starts, *reasoning.later_starts, *reasoning.first_starts):
            self._enter_thought(marker)
        elif marker in (
            *reasoning.frames,
            *reasoning.first_frames,
            *reasoning.notes,
            *self._format.boxes,
        ):
            self._enter_frame(marker)
        elif marker in self._leavable and (self._is_after_call or self._lacks_closer):
            self._lacks_closer = False
            self._begin(TextAfterCall())
        elif not self._may_call_at(marker):
            self._refuse(marker)
        elif self._in_thought and self._may_draft:
            self._draft(marker)
        else:
            self._open_block(marker)

    def _enter_in_code(self, marker: str) -> None:
        """Treat a marker in code as text, unless it may be the last one of an answer in a frame."""
        if self._is_framed and marker in (
            *self._format.reasoning.ends,
            *self._format.reasoning.frames,
        ):
            self._stray.add(marker, may_end_line=False)
        else:
            self._quote(marker)

    def _enter_inner(self, marker: str) -> None:
        """Treat a tag of an element in an answer as text, unless it is the last one in a frame."""
        self._emit(self._stray.release())
        if self._is_framed and self._inner.last:
            self._stray.add(marker, may_end_line=False)
        else:
            self._emit(marker)

    def _enter_end(self, marker: str) -> None:
        if self._in_thought or self._segment.is_blank:
            self._is_framed |= marker == self._format.reasoning.answer
            self._end_thought()
        elif self._quotes_thoughts:
            self._emit(marker)
        else:
            self._hold_stray(marker)

    def _enter_thought(self, marker: str) -> None:
        reasoning = self._format.reasoning
        is_word = marker in reasoning.first_starts
        is_later = marker in reasoning.later_starts and not self._is_in_prose(marker)
        is_later = is_later or self._follows_frame
        may_open = self._segment.is_blank or is_later
        if may_open and not self._in_thought:
            self._begin(ThoughtText(), in_thought=True)
        elif is_word or not self._segment.is_blank:
            self._quotes_thoughts |= not (self._in_thought or is_word)
            self._emit(marker)

    def _enter_frame(self, marker: str) -> None:
        reasoning = self._format.reasoning
        if marker in self._format.boxes:
            self._settle()
        elif self._in_thought or (marker in reasoning.first_frames and not self._segment.is_blank):
            if marker not in reasoning.notes:
                self._emit(marker)
        elif not self._segment.is_blank:
            self._hold_stray(marker)
        else:
            self._is_framed = True
            if type(self._segment) is FirstText:
                self._begin(TextAfterThought())

    def _hold_stray(self, marker: str) -> None:
        """Hold back a mark that ends content, unless it is a word of a sentence.

        Right after a word or a sentence it is markup without doubt.
        """
        reasoning = self._format.reasoning
        if self._stray.marks and self._stray.marks == self._inner.last:
            self._emit(self._stray.release())
        self._follows_frame = marker in reasoning.frames or bool(reasoning.bridge)
        if self._stray.text or not self._ends_sentence:
            self._hold(marker)

    def _hold(self, marker: str) -> None:
        self._settle()
        self._stray.add(marker, may_end_line=self._may_end_line)

    @property
    def _may_end_line(self) -> bool:
        """Whether a mark here is no word of its line: alone on it so far, or glued to its text."""
        return self._code.begins_line or not self._last_char.isspace()

    def _emit_marker(self, text: str) -> None:
        """Treat text as such, unless it is a marker of calls that may end its line.

        It does alone on the line, and right after a word or a sentence.
        """
        self._settle()
        is_quoted = self._in_thought or self._code.quotes(text)
        tools = self._format.tools
        is_stray = text in tools.strays and not (is_quoted or self._shows_call)
        may_end = self._code.begins_line or self._last_char.isalnum() or self._last_char in STOPS
        if is_stray and (self._stray.text or may_end):
            self._stray.add(text, may_end_line=may_end)
        else:
            # The end of a call that is shown is shown too.
            self._shows_call = text.startswith(tools.openers) or (
                self._shows_call and text not in tools.closers
            )
            self._emit(text)

    def _refuse(self, marker: str) -> None:
        """Treat a marker that begins no call here as text; an opener after a name may still."""
        opener = self._format.tools.name_lead
        if opener in self._format.tools.openers and marker.endswith(opener) and marker != opener:
            self._emit(marker.removesuffix(opener))
            self._enter(opener)
        else:
            self._emit_marker(marker)

    @property
    def _ends_sentence(self) -> bool:
        """Whether content ends with a word or a sentence, without whitespace."""
        return self._last_char.isalnum() or self._last_char in SENTENCE_ENDS

    def _is_in_prose(self, opener: str) -> bool:
        """Tell whether a marker stands within a line of text, not right after a sentence."""
        self._settle()
        if self._in_thought or self._is_after_call or opener.startswith("\n"):
            return False
        is_within = not (self._code.begins_line or self._ends_sentence)
        return is_within or (self._code.quotes(opener) and self._code.has_prose)

    def _may_call_at(self, marker: str) -> bool:
        tools = self._format.tools
        if self._in_thought and tools.name_lead in tools.openers:
            return tools.ends_thought and marker.endswith(tools.name_lead)
        if marker in self._leads:
            begins = self._segment.is_blank or self._follows_frame
            # The name of a tool may begin a program.
            is_own = marker in tools.leads
            begins |= is_own and self._fence is not None and self._fence.is_begun
            return begins and not self._in_thought
        return marker in tools.openers and (tools.ends_thought or not self._in_thought)

    @property
    def _is_after_call(self) -> bool:
        """Whether only whitespace has followed the latest call."""
        return isinstance(self._segment, TextAfterCall) and self._segment.is_blank

    def _begin(self, segment: Segment, *, in_thought: bool = False) -> None:
        self._send(self._segment.pass_text(self._stray.drop()))
        self._segment = segment
        self._in_thought = in_thought

    def _open_block(self, opener: str) -> None:
        if self._refused and opener in self._format.tools.openers:
            self._refused -= 1
            self._emit_marker(opener)
            return
        context = self._context(opener, self._calls)
        # Models repeat a block without its opener: the calls are the same.
        is_repeated = self._is_after_call and self._block_text.startswith(opener) and opener
        echo = self._block_text.removeprefix(opener) if is_repeated else ""
        self._block = Block(self._format.tools, context, self._make_reader, echo=echo)

    def _context(self, opener: str, calls: CallLedger) -> ReaderContext:
        return ReaderContext(
            opener=opener,
            calls=calls,
            in_thought=self._in_thought,
            in_prose=self._is_in_prose(opener),
            in_fence=self._fence is not None and self._fence.is_around_calls,
            prompt_tail=self._prompt_tail,
        )

    def _is_in_code(self, marker: str) -> bool:
        """Tell whether a marker here is text for now, in code that is more than a wrapped call."""
        self._settle()
        may_quote = marker not in self._unquotable
        is_box = marker in self._format.boxes
        is_open = self._code.is_delimited if is_box else self._code.quotes(marker)
        if self._in_thought or not (may_quote and is_open):
            return False
        return self._code.has_prose or not self._code.is_fenced

    def _quote(self, marker: str) -> None:
        """Treat a marker in code as text, unless it may begin a call in a block that never ends."""
        is_opener = marker in self._format.tools.openers and self._code.is_fenced
        if self._quotation is None and is_opener:
            reader = self._make_reader(self._context(marker, CallLedger(self._tools)))
            self._quotation = Quotation(marker, reader)
            self._quoting_fence = self._code.fences_begun
            self._code.follow(marker)
        else:
            if marker in self._format.tools.openers:
                self._code.note_quoted()
            self._emit(marker)

    def _draft(self, marker: str) -> None:
        """Treat a call in a thought as a draft, unless the thought never ends."""
        if self._quotation is None:
            reader = self._make_reader(self._context(marker, CallLedger(self._tools)))
            self._quotation = Quotation(self._segment.pass_text(marker), reader)
        else:
            self._emit(marker)

    def _end_thought(self) -> None:
        """End a thought; apparent calls in it are part of it."""
        if self._quotation is not None and self._in_thought:
            self._release_draft()
            self._last_draft, self._draft_place = self._quotation.text, len(self._deltas)
            self._quotation = None
        self._begin(TextAfterThought())

    def _release_draft(self) -> None:
        """Show the draft at the end of a thought, where it belongs."""
        if self._last_draft:
            self._deltas.insert(self._draft_place, ReasoningDelta(self._last_draft))
        self._last_draft = ""

    def _call_draft(self) -> None:
        """Take the draft at the end of a thought for the call of a reply without any other."""
        text = self._last_draft
        trial, last = self._tried(text, truncated=False)
        is_text = isinstance(last, ContentDelta) and not last.text.isspace()
        if trial.completed_calls and not (is_text or self._calls.completed):
            self._last_draft, self._may_draft = "", False
            self._begin(ThoughtText(), in_thought=True)
            self._rest = text
            self._end(truncated=False)

    def _try_quotation(self, quotation: Quotation) -> None:
        output = quotation.read(self._rest)
        self._rest = output.rest or ""
        if output.rest is None or quotation.is_call:
            return
        self._quotation = None
        text = quotation.text[: len(quotation.text) - len(self._rest)]
        if self._in_thought:
            self._deltas.append(ReasoningDelta(quotation.opener))
            text = text.removeprefix(quotation.opener)
        self._emit(text)

    def _end_draft(self, quotation: Quotation, *, truncated: bool) -> None:
        """End inside a thought: the apparent draft is a call, which ends the thought.

        It stays a draft if the limit cut the thought off after it.
        """
        self._quotation = None
        text = quotation.text + self._unscanned()
        if truncated and self._has_words_after_calls(text):
            self._deltas.append(ReasoningDelta(text))
            return
        self._may_draft = False
        self._rest = text
        self._route()

    def _has_words_after_calls(self, thought: str) -> bool:
        last = self._tried(thought, truncated=True)[1]
        return isinstance(last, ContentDelta) and not last.text.isspace()

    def _tried(self, thought: str, *, truncated: bool) -> tuple[Self, Delta | None]:
        """Return a router that has read a thought, whose calls count, and its last delta."""
        family = self._format.without_drafts()
        router = type(self)(family, tools=self._tools, prompt_tail=family.reasoning.start)
        *_, last = (None, *router.feed(thought), *router.finish(truncated=truncated))
        return router, last

    def _end_quotation(self, quotation: Quotation, *, truncated: bool) -> None:
        """End inside a code block that may be open: the apparent quotation is then a call."""
        self._read_content()
        rest = self._unscanned()
        # The end of the block may be the beginning of a marker.
        self._code.follow(rest)
        self._code.settle()
        text = quotation.text + rest
        self._quotation = None
        if truncated or not self._code.is_fenced:
            self._deltas.append(ContentDelta(text))
            return
        self._unquotable = frozenset((*self._own_marks(), *self._format.tools.lapse_marks))
        self._rest = text
        self._route()

    def _emit(self, text: str) -> None:
        self._follows_frame = self._follows_frame and not text.strip()
        if self._stray.marks:
            text = self._stray.pass_text(text)
        if self._in_thought or self._segment.is_blank:
            text = self._segment.pass_text(text)
        # Otherwise the segment passes everything.
        self._send(text)

    def _read_content(self) -> None:
        """Have code and JSON followed up to here."""
        text = "".join(self._unread)
        self._unread.clear()
        self._code.follow(text)
        self._json.follow(text)

    def _settle(self) -> None:
        """Have code followed up to here, with a run of backticks that ends here."""
        self._read_content()
        self._code.settle()

    def _send(self, text: str) -> None:
        if not text:
            return
        if self._in_thought:
            self._think(text)
        else:
            self._pass(self._fence.pass_text(text) if self._fence else text)

    def _pass(self, text: str) -> None:
        if not text:
            return
        self._last_char = text[-1]
        self._unread.append(text)
        if self._quotation is not None:
            self._read_content()
            self._quotation.add(text)
            if self._code.is_fenced and self._code.fences_begun == self._quoting_fence:
                return
            text = self._quotation.text
            self._quotation = None
        self._deltas.append(ContentDelta(text))

    def _think(self, text: str) -> None:
        if self._quotation is not None:
            self._quotation.add(text)
        else:
            self._deltas.append(ReasoningDelta(text))

    def _own_marks(self) -> Set[str]:
        """Return the marks of calls that are not those of other families."""
        others = (*self._format.reasoning.marks, *self._format.tools.lapse_marks)
        return {*self._markers()} - {*others}

    def _markers(self) -> tuple[str, ...]:
        reasoning, tools, boxes = self._format.reasoning, self._format.tools, self._format.boxes
        calls = (*tools.openers, *self._leads, *self._leavable)
        thoughts = (*reasoning.marks, *reasoning.first_starts, *reasoning.first_frames)
        return (*thoughts, *boxes, *(calls if self._calls.expects_calls else ()))


def _repetitions(opener: str, text: str) -> int:
    """Return how often a text begins with an opener, but for the last ones.

    A block that begins with several of them is none with fewer: reading each takes quadratic time.
    The last ones are few, and closer to a possible damaged call.
    """
    if not opener.strip() or len(text) < _NEAR_CHARS:
        return 0
    begun = re.escape(opener.strip())
    again = re.compile(rf"(?:(?!{begun})[\s\[])*+{begun}")
    places, place = [0], 0
    while found := again.match(text, place):
        place = found.end()
        places.append(place)
    return sum(each < place - _NEAR_CHARS for each in places)


def _leads(tool_format: ToolFormat, tools: Mapping[str, JsonSchema] | None) -> tuple[str, ...]:
    """Return the texts that begin a call at the start of content."""
    lead = tool_format.name_lead
    names = tools or () if lead else ()
    # Not where a bracket follows, as in code; each costs a marker for every tool.
    is_certain = lead in tool_format.openers or tool_format.names_lead_json
    usual = USUAL_NAMESPACES if is_certain else ()
    spaces = ("", *(f"{namespace}." for namespace in usual))
    return (*tool_format.leads, *(f"{space}{name}{lead}" for name in names for space in spaces))


@lru_cache
def _automaton(markers: tuple[str, ...]) -> Automaton:
    return Automaton(markers, prefers_longer=True)
