"""A conversation at the terminal with any running backend."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from backend.cli.client import BackendClient, CallError
from backend.cli.conversation import user_message
from backend.cli.render import ERROR_STYLE, QUIET_STYLE, print_reply, printable
from backend.cli.tools import Toolbox
from backend.pb import backend_pb2 as pb

PROMPT = "> "
HELP = "/clear begins anew, /exit leaves; Ctrl-C cancels a reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What every request of a chat carries.

    Attributes:
        system: A system message before all others; empty for none.
        thinking: Whether the model may think; `None` leaves it to the model.
        max_tokens: Per reply; 0 is up to the context.
        toolbox: Tools that the model may call.
    """

    system: str = ""
    thinking: bool | None = None
    temperature: float = 0.0
    max_tokens: int = 0
    toolbox: Toolbox | None = None


class Chat:
    """One conversation; a reply that fails or is cancelled is forgotten with its question."""

    def __init__(
        self,
        console: Console,
        client: BackendClient,
        runner: asyncio.Runner,
        settings: ChatSettings,
    ) -> None:
        """Prepare a conversation.

        Args:
            console: Where it is held.
            client: Lives on the runner's event loop.
            runner: Runs one reply at a time, and turns Ctrl-C into its cancellation.
            settings: What every request carries.
        """
        self._console = console
        self._client = client
        self._runner = runner
        self._settings = settings
        self._messages = self._opening()

    def run(self) -> None:
        """Read and answer lines until the user leaves: by /exit, Ctrl-C or the end of input."""
        self._say(HELP, QUIET_STYLE)
        while (line := self._read()) is not None:
            match line:
                case "":
                    continue
                case "/exit":
                    return
                case "/clear":
                    self._messages = self._opening()
                    self._say("a new conversation", QUIET_STYLE)
                case _:
                    self._ask(line)

    def _read(self) -> str | None:
        try:
            return self._console.input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def _ask(self, text: str) -> None:
        try:
            self._messages = self._answered([*self._messages, user_message(text)])
        except CallError as error:
            self._say(printable(str(error)), ERROR_STYLE)
        except (EOFError, KeyboardInterrupt):
            self._say("cancelled", QUIET_STYLE)

    def _answered(self, messages: list[pb.Message]) -> list[pb.Message]:
        """Return the conversation with the reply, and with the calls it took to get there."""
        while True:
            increments = self._client.stream(self._request(messages))
            turn = self._runner.run(print_reply(self._console, increments))
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
            Tools=settings.toolbox.schemas if settings.toolbox else "",
            Tokens=settings.max_tokens,
            Temperature=settings.temperature,
            Metadata={} if thinking is None else {"enable_thinking": str(thinking).lower()},
        )

    def _opening(self) -> list[pb.Message]:
        system = self._settings.system
        return [pb.Message(role="system", content=system)] if system else []

    def _say(self, text: str, style: str) -> None:
        self._console.print(Text(text, style), soft_wrap=True)
