"""A reply on the terminal while it arrives: thoughts dim, calls in a box, content plain."""

import base64
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Self, assert_never

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from backend.core.step import ContentDelta, Delta, Increment, ReasoningDelta, ToolCallDelta, Usage
from backend.output.collect import CollectedCall, Collector, Completion
from backend.pb import backend_pb2 as pb

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


def named_pictures(text: str) -> Iterator[Path]:
    """Yield the files that words of a text name, if they are pictures that exist."""
    for word in text.split():
        path = Path(word.strip("'\""))
        # A word may be too long for a path, or name the home of nobody.
        with suppress(OSError, RuntimeError):
            if path.suffix.lower() in PICTURE_SUFFIXES and (found := path.expanduser()).is_file():
                yield found


def encoded(path: Path) -> str:
    """Return a file as the protocol's `Images` has it."""
    return base64.b64encode(path.read_bytes()).decode()


def user_message(text: str) -> pb.Message:
    """Return the user's message."""
    return pb.Message(role="user", content=text)


def reply_message(reply: Completion) -> pb.Message:
    """Return a reply as a message of the next request."""
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.tool_calls
    ]
    return pb.Message(
        role="assistant",
        content=reply.content,
        reasoning_content=reply.reasoning,
        tool_calls=json.dumps(calls, ensure_ascii=False) if calls else "",
    )


def tool_message(call: CollectedCall, result: str) -> pb.Message:
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


def facts_table(rows: Iterable[tuple[str, RenderableType]] = ()) -> Table:
    """Return a table of labels and facts."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=LABEL_STYLE)
    facts.add_column()
    for row in rows:
        facts.add_row(*row)
    return facts


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


async def print_reply(console: Console, increments: AsyncGenerator[Increment, None]) -> Completion:
    """Print a reply while it arrives and its statistics, and return it.

    The generator is always closed: an interrupted reply is cancelled.
    """
    collector = Collector()
    waiting = console.status("")
    with waiting, ReplyPrinter(console) as printer:
        async with aclosing(increments):
            async for increment in increments:
                waiting.stop()
                collector.add(increment)
                for delta in increment.deltas:
                    printer.show(delta)
    reply = collector.completion
    console.print(Text(statistics(reply.usage), QUIET_STYLE))
    return reply


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
        self._name = self._arguments = ""
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def add(self, piece: ToolCallDelta) -> None:
        self._name = piece.name or self._name
        self._arguments += piece.arguments
        self._live.update(self._panel(), refresh=True)

    def close(self) -> None:
        self._live.stop()
        self._console.print(self._panel())

    def _panel(self) -> Panel:
        text = Text(printable(f"{self._name}({self._arguments})"))
        return Panel(text, title="tool call", title_align="left", expand=False)
