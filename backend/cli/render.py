"""A reply on the terminal while it arrives: thoughts dim, calls in a box, content plain."""

import base64
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, assert_never

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from backend.core.prompt import ToolCall
from backend.core.step import ContentDelta, Delta, Increment, ReasoningDelta, ToolCallDelta, Usage
from backend.pb import backend_pb2 as pb


@dataclass(slots=True)
class Turn:
    """One reply of the model, as far as it has arrived."""

    content: str = ""
    reasoning: str = ""
    usage: Usage = field(default_factory=Usage)
    _calls: dict[int, ToolCall] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, in order."""
        return tuple(self._calls[index] for index in sorted(self._calls))

    def add(self, increment: Increment) -> None:
        """Append an increment."""
        self.usage = increment.usage
        for delta in increment.deltas:
            match delta:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallDelta():
                    self._add_call(delta)
                case _:
                    assert_never(delta)

    def message(self) -> pb.Message:
        """Return the turn as a message of the next request."""
        calls = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.calls
        ]
        return pb.Message(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning,
            tool_calls=json.dumps(calls, ensure_ascii=False) if calls else "",
        )

    def _add_call(self, piece: ToolCallDelta) -> None:
        call = self._calls.get(piece.index, ToolCall(call_id="", name="", arguments=""))
        self._calls[piece.index] = extended(call, piece)


def extended(call: ToolCall, piece: ToolCallDelta) -> ToolCall:
    """Return a call with one more piece: id and name replace, arguments append."""
    return replace(
        call,
        call_id=piece.call_id or call.call_id,
        name=piece.name or call.name,
        arguments=call.arguments + piece.arguments,
    )


PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


def named_pictures(text: str) -> Iterator[Path]:
    """Yield the files that words of a text name, if they are pictures that exist."""
    for word in text.split():
        path = Path(word.strip("'\"")).expanduser()
        if path.suffix.lower() in PICTURE_SUFFIXES and path.is_file():
            yield path


def encoded(path: Path) -> str:
    """Return a file as the protocol's `Images` has it."""
    return base64.b64encode(path.read_bytes()).decode()


def user_message(text: str) -> pb.Message:
    """Return the user's message."""
    return pb.Message(role="user", content=text)


def tool_message(call: ToolCall, result: str) -> pb.Message:
    """Return the result of a call."""
    return pb.Message(role="tool", name=call.name, tool_call_id=call.call_id, content=result)


def model_options(model: str) -> pb.ModelOptions:
    """Return the options to load a model: from its path if it exists, else by its name."""
    path = Path(model).expanduser()
    return pb.ModelOptions(Model=model, ModelFile=str(path.resolve()) if path.exists() else "")


THOUGHT_STYLE = "dim italic"
CONTENT_STYLE = ""
QUIET_STYLE = "dim"
LABEL_STYLE = "bold cyan"
ERROR_STYLE = "red"

# A model, or a server's message, must not control the terminal.
_CONTROL_CHARACTERS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def printable(text: str) -> str:
    """Return the text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROL_CHARACTERS)


def statistics(usage: Usage) -> str:
    """Return a reply's counts and its speed in one line."""
    parts = [f"{usage.completion_tokens} tokens"]
    if usage.decode_ms > 0.0:
        parts.append(f"{usage.completion_tokens / usage.decode_ms * 1000.0:.1f} tokens/s")
    parts.append(f"{usage.prompt_tokens} prompt tokens")
    return " · ".join(parts)


def print_labelled(console: Console, label: str, text: str) -> None:
    """Print a line that is not the model's, after a label."""
    console.print(Text.assemble((f"{label:<8}", LABEL_STYLE), printable(text)), soft_wrap=True)


async def print_reply(console: Console, increments: AsyncGenerator[Increment, None]) -> Turn:
    """Print a reply while it arrives and its statistics, and return the turn.

    The generator is always closed: an interrupted reply is cancelled.
    """
    turn = Turn()
    waiting = console.status("")
    with waiting, ReplyPrinter(console) as printer:
        async with aclosing(increments):
            async for increment in increments:
                waiting.stop()
                turn.add(increment)
                for delta in increment.deltas:
                    printer.show(delta)
    console.print(Text(statistics(turn.usage), QUIET_STYLE))
    return turn


class ReplyPrinter:
    """Prints the deltas of one reply; leaving it ends the open line or box."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text_kind: type[Delta] | None = None
        self._line_is_open = False
        self._box: _CallBox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end_section()

    def show(self, delta: Delta) -> None:
        """Print one delta at once."""
        match delta:
            case ReasoningDelta(text):
                self._show_text(ReasoningDelta, text, THOUGHT_STYLE)
            case ContentDelta(text):
                self._show_text(ContentDelta, text, CONTENT_STYLE)
            case ToolCallDelta():
                self._show_call(delta)
            case _:
                assert_never(delta)

    def _show_text(self, kind: type[Delta], text: str, style: str) -> None:
        text = printable(text)
        if kind is not self._text_kind:
            text = text.lstrip("\n")
            if not text:
                return
            self._end_section()
            self._text_kind = kind
        self._console.print(Text(text, style), end="", soft_wrap=True)
        self._line_is_open = not text.endswith("\n")

    def _show_call(self, piece: ToolCallDelta) -> None:
        if self._box is None or self._box.index != piece.index:
            self._end_section()
            self._box = _CallBox(self._console, piece.index)
        self._box.add(piece)

    def _end_section(self) -> None:
        if self._box is not None:
            self._box.close()
            self._box = None
        if self._line_is_open:
            self._console.print()
            self._line_is_open = False
        self._text_kind = None


class _CallBox:
    """A box that grows with the arguments of a call; without a terminal it appears at the end."""

    def __init__(self, console: Console, index: int) -> None:
        self.index = index
        self._console = console
        self._call = ToolCall(call_id="", name="", arguments="")
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def add(self, piece: ToolCallDelta) -> None:
        self._call = extended(self._call, piece)
        self._live.update(self._panel(), refresh=True)

    def close(self) -> None:
        self._live.stop()
        self._console.print(self._panel())

    def _panel(self) -> Panel:
        text = Text(printable(f"{self._call.name}({self._call.arguments})"))
        return Panel(text, title="tool call", title_align="left", expand=False)
