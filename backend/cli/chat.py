"""A conversation at the terminal with any running backend."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from backend.cli.client import BackendClient, CallError
from backend.cli.conversation import encoded, named_pictures, user_message
from backend.cli.render import ERROR_STYLE, QUIET_STYLE, print_reply, printable
from backend.cli.tools import Toolbox, read_toolbox
from backend.core.delta import Usage
from backend.pb import backend_pb2 as pb

PROMPT = "> "
CONTINUING_PROMPT = "… "
CONTINUED = "\\"
GREETING = "/exit leaves, /help lists commands; Ctrl-C cancels a reply"
HELP = """\
/clear         begin a new conversation
/system TEXT   begin a new conversation with another system message, or without
/tools FILE    offer the tools of a JSON file, or none; you type their results
/image FILE    send a picture with the next message; its path in the message does the same
/stats         show the tokens and the speed of this chat
/exit          leave; so does Ctrl-D
//...          send a message that begins with a slash
A line that ends in \\ goes on in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """The settings of every request of a chat.

    Attributes:
        system: A system message before all others; empty for none.
        thinking: Whether the model may think; `None` lets the model decide.
        max_tokens: Per reply; 0 is up to the context.
        toolbox: Tools that the model may call.
    """

    system: str = ""
    thinking: bool | None = None
    temperature: float = 0.0
    max_tokens: int = 0
    toolbox: Toolbox | None = None


class Chat:
    """One conversation; a failed or cancelled reply is dropped with its question."""

    def __init__(
        self,
        console: Console,
        client: BackendClient,
        runner: asyncio.Runner,
        settings: ChatSettings,
        place: str = "",
    ) -> None:
        """Create a conversation.

        Args:
            console: The terminal.
            client: Lives on the runner's event loop.
            runner: Runs one reply at a time, and turns Ctrl-C into its cancellation.
            settings: The settings of every request.
            place: The model and the address, shown at the start.
        """
        self._console = console
        self._client = client
        self._runner = runner
        self._settings = settings
        self._place = place
        self._messages = self._opening()
        # Of the whole conversation, and of the next message.
        self._pictures: list[str] = []
        self._next_pictures: list[str] = []
        self._usages: list[Usage] = []

    def run(self) -> None:
        """Read and answer lines until the user leaves: by /exit, Ctrl-C or the end of input."""
        self._say(f"{self._place}\n{GREETING}" if self._place else GREETING, QUIET_STYLE)
        while (text := self._read()) is not None:
            if text == "/exit":
                return
            if text.startswith("//"):
                self._ask(text[1:])
            elif text.startswith("/") and not any(named_pictures(text.split()[0])):
                self._obey(*text.partition(" ")[::2])
            elif text:
                self._ask(text)

    def _read(self) -> str | None:
        """Return the typed text; a line that ends in a backslash continues on the next."""
        lines = []
        prompt = PROMPT
        try:
            while (line := self._console.input(prompt).strip()).endswith(CONTINUED):
                lines.append(line.removesuffix(CONTINUED))
                prompt = CONTINUING_PROMPT
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        return "\n".join([*lines, line])

    def _obey(self, name: str, argument: str) -> None:
        argument = argument.strip()
        match name:
            case "/help":
                self._say(HELP, QUIET_STYLE)
            case "/image":
                self._attach(argument)
            case "/stats":
                self._say(_totals(self._usages), QUIET_STYLE)
            case "/clear":
                self._begin("a new conversation")
            case "/system":
                self._settings = replace(self._settings, system=argument)
                self._begin("a new conversation with this system message")
            case "/tools":
                self._offer(argument)
            case _:
                self._say(f"{name} is no command: /help lists them, // sends a slash", ERROR_STYLE)

    def _begin(self, news: str) -> None:
        self._messages = self._opening()
        self._pictures, self._next_pictures = [], []
        self._say(news, QUIET_STYLE)

    def _attach(self, path: str) -> None:
        """Keep a picture for the next message."""
        try:
            self._next_pictures.append(encoded(Path(path).expanduser()))
        except OSError as error:
            self._say(printable(str(error)), ERROR_STYLE)
        else:
            self._say(f"{printable(path)} goes with the next message", QUIET_STYLE)

    def _offer(self, path: str) -> None:
        """Offer the tools of a file, or none without a path."""
        try:
            toolbox = read_toolbox(self._console, Path(path)) if path else None
        except (OSError, ValueError) as error:
            self._say(printable(str(error)), ERROR_STYLE)
            return
        self._settings = replace(self._settings, toolbox=toolbox)
        self._say(f"offering the tools of {path}" if path else "offering no tools", QUIET_STYLE)

    def _ask(self, text: str) -> None:
        before = list(self._pictures)
        try:
            self._pictures += [*self._next_pictures, *map(encoded, named_pictures(text))]
            self._messages = self._answered([*self._messages, user_message(text)])
        except (CallError, OSError) as error:
            self._pictures = before
            self._say(printable(str(error)), ERROR_STYLE)
        except (EOFError, KeyboardInterrupt):
            self._pictures = before
            self._say("cancelled", QUIET_STYLE)
        self._next_pictures = []

    def _answered(self, messages: list[pb.Message]) -> list[pb.Message]:
        """Return the conversation with the reply, and the calls before it."""
        while True:
            increments = self._client.stream(self._request(messages))
            turn = self._runner.run(print_reply(self._console, increments))
            self._usages.append(turn.usage)
            messages = [*messages, turn.message()]
            toolbox = self._settings.toolbox
            if not turn.calls or toolbox is None:
                return messages
            messages += toolbox.answers(turn)

    def _request(self, messages: Sequence[pb.Message]) -> pb.PredictOptions:
        settings = self._settings
        thinking = settings.thinking
        return pb.PredictOptions(
            UseTokenizerTemplate=True,
            Messages=messages,
            Images=self._pictures,
            Tools=settings.toolbox.schemas if settings.toolbox else "",
            Tokens=settings.max_tokens,
            Temperature=settings.temperature,
            Seed=-1,
            Metadata={} if thinking is None else {"enable_thinking": str(thinking).lower()},
        )

    def _opening(self) -> list[pb.Message]:
        system = self._settings.system
        return [pb.Message(role="system", content=system)] if system else []

    def _say(self, text: str, style: str) -> None:
        self._console.print(Text(text, style), soft_wrap=True)


def _totals(usages: Sequence[Usage]) -> str:
    """Return counts over all replies, and their decoding speed."""
    generated = sum(usage.completion_tokens for usage in usages)
    seconds = sum(usage.decode_ms for usage in usages) / 1000.0
    parts = [
        f"{len(usages)} replies",
        f"{sum(usage.prompt_tokens for usage in usages):,} prompt tokens",
        f"{generated:,} tokens generated",
    ]
    if seconds > 0.0:
        parts.append(f"{generated / seconds:.1f} tokens/s")
    return " · ".join(parts)
