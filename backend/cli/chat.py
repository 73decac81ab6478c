"""A conversation at the terminal with any running backend."""

import asyncio
import importlib
import json
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import grpc
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from backend.cli.app import FiniteRange
from backend.cli.client import BackendClient, CallError, address_option, explained, token_option
from backend.cli.pull import DamagedError, cached_models, pull
from backend.cli.render import (
    ERROR_STYLE,
    QUIET_STYLE,
    encoded,
    model_options,
    named_pictures,
    print_labelled,
    print_reply,
    printable,
    reply_message,
    tool_message,
    user_message,
)
from backend.cli.server_process import ServerError, ServerProcess
from backend.cli.status import inspect
from backend.config import ModelOptions
from backend.core.step import Usage
from backend.demo import WEATHER_TOOL
from backend.errors import BackendError
from backend.model.checkpoint.hub import HubModel, resolve
from backend.output.collect import CollectedCall, Completion
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.message_fields import offer
from common.rpc import model_name

CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "foggy")
MILDEST, SPREAD = 8, 20


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools in OpenAI's format, as JSON text, and the function that answers a call.

    An answer that the user did not type is printed.
    """

    schemas: str
    answer: Callable[[CollectedCall], str]

    def answers(self, reply: Completion) -> list[pb.Message]:
        """Answer the calls of a reply, in their order."""
        return [tool_message(call, self.answer(call)) for call in reply.tool_calls]


def weather_toolbox(console: Console) -> Toolbox:
    """Return the demo's weather tool; it makes the weather up."""

    def answer(call: CollectedCall) -> str:
        result = made_up_weather(call)
        print_labelled(console, "tool", result)
        return result

    return Toolbox(json.dumps([WEATHER_TOOL]), answer)


def read_toolbox(console: Console, path: Path) -> Toolbox:
    """Return the tools listed in a JSON file; the user types their results.

    Raises:
        ValueError: It is not a JSON array of tools with names.
    """
    try:
        schemas = path.read_text(encoding="utf-8")
        offered = offer(schemas)
    except (BackendError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not offered.tools:
        raise ValueError(f"{path}: none of its tools is a function with a name")
    return Toolbox(
        schemas,
        lambda call: console.input(f"{printable(call.name)} returns: ", markup=False),
    )


def made_up_weather(call: CollectedCall) -> str:
    """Return a fictional weather report as JSON, the same for the same arguments."""
    digest = zlib.crc32(call.arguments.encode())
    condition = CONDITIONS[digest % len(CONDITIONS)]
    return json.dumps({"temperature": MILDEST + digest % SPREAD, "condition": condition})


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


@dataclass(eq=False)
class Chat:
    """One conversation; a failed or cancelled reply is dropped with its question.

    Attributes:
        client: Lives on the runner's event loop.
        runner: Runs one reply at a time, and turns Ctrl-C into its cancellation.
        place: The model and the address, shown at the start.
    """

    console: Console
    client: BackendClient
    runner: asyncio.Runner
    settings: ChatSettings
    place: str = ""

    def __post_init__(self) -> None:
        self._messages = self._opening()
        # Of the whole conversation, and of the next message.
        self._pictures: list[str] = []
        self._next_pictures: list[str] = []
        self._usages: list[Usage] = []

    def run(self) -> None:
        """Read and answer lines until the user leaves: by /exit, Ctrl-C or the end of input."""
        self._say(f"{self.place}\n{GREETING}" if self.place else GREETING, QUIET_STYLE)
        while (text := self._read()) is not None:
            if text.split()[:1] == ["/exit"]:
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
            while (line := self.console.input(prompt).strip()).endswith(CONTINUED):
                lines.append(line.removesuffix(CONTINUED))
                prompt = CONTINUING_PROMPT
        except (EOFError, KeyboardInterrupt):
            self.console.print()
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
                self.settings = replace(self.settings, system=argument)
                kind = "with this" if argument else "without a"
                self._begin(f"a new conversation {kind} system message")
            case "/tools":
                self._offer(argument)
            case _:
                self._say(f"{name} is no command: /help lists them, // sends a slash", ERROR_STYLE)

    def _begin(self, news: str) -> None:
        self._messages = self._opening()
        self._pictures, self._next_pictures = [], []
        self._say(news, QUIET_STYLE)

    def _attach(self, path: str) -> None:
        if not path:
            self._say("/image FILE sends a picture: which?", ERROR_STYLE)
            return
        try:
            self._next_pictures.append(encoded(Path(path).expanduser()))
        except (OSError, RuntimeError) as error:
            self._say(printable(str(error)), ERROR_STYLE)
        else:
            self._say(f"{printable(path)} goes with the next message", QUIET_STYLE)

    def _offer(self, path: str) -> None:
        """Offer the tools of a file, or none without a path."""
        try:
            toolbox = read_toolbox(self.console, Path(path).expanduser()) if path else None
        except (OSError, RuntimeError, ValueError) as error:
            self._say(printable(str(error)), ERROR_STYLE)
            return
        self.settings = replace(self.settings, toolbox=toolbox)
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
            increments = self.client.stream(self._request(messages))
            reply = self.runner.run(print_reply(self.console, increments))
            self._usages.append(reply.usage)
            messages = [*messages, reply_message(reply)]
            toolbox = self.settings.toolbox
            if not reply.tool_calls or toolbox is None:
                return messages
            messages += toolbox.answers(reply)

    def _request(self, messages: Sequence[pb.Message]) -> pb.PredictOptions:
        settings = self.settings
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
        system = self.settings.system
        return [pb.Message(role="system", content=system)] if system else []

    def _say(self, text: str, style: str) -> None:
        self.console.print(Text(text, style), soft_wrap=True)


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


CHAT_HINT = "chat with the embedded model: mlx-grpc-backend chat demo"


class NoModelError(Exception):
    """Nothing is loaded, and no model was named."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The backend and the model that a chat was asked for.

    Attributes:
        model: To be loaded; empty for the loaded one.
        is_chosen: Whether the address was given, so that no other backend will do.
    """

    address: str
    token: str
    model: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Partner:
    """The backend that a chat talks to, and where it listens."""

    client: BackendClient
    address: str

    async def described(self) -> str:
        """Return the model and the address in one line."""
        name = (await inspect(self.client)).report.model.name or "the loaded model"
        return f"{name} at {self.address}"


@asynccontextmanager
async def partner_of(console: Console, wanted: Wanted) -> AsyncIterator[Partner]:
    """Yield a backend that has the wanted model.

    Raises:
        NoModelError: It has no model.
    """
    if await _will_do(wanted):
        async with BackendClient(wanted.address, wanted.token) as client:
            await _ensure_model(console, client, wanted.model)
            yield Partner(client, wanted.address)
        return
    async with _own_backend(console, wanted) as partner:
        yield partner


@asynccontextmanager
async def _own_backend(console: Console, wanted: Wanted) -> AsyncIterator[Partner]:
    await _fetch(console, wanted.model)
    with TemporaryDirectory(prefix="mlx-backend-chat-") as directory:
        log = Path(directory) / "server.log"
        with ServerProcess.start(log) as server:
            try:
                await server.wait_until_ready(wanted.token)
                async with BackendClient(server.address, wanted.token) as client:
                    await _ensure_model(console, client, wanted.model)
                    yield Partner(client, server.address)
            except (CallError, ServerError) as error:
                raise ServerError(
                    f"{error}\nThe server's log ends:\n{server.log_tail(5)}"
                ) from None


async def _will_do(wanted: Wanted) -> bool:
    """Tell whether to talk to the backend at the address, answering or not."""
    if wanted.is_chosen or not wanted.model:
        return True
    async with BackendClient(wanted.address, wanted.token) as client:
        try:
            loaded = (await inspect(client)).report.model.name
        except CallError as error:
            return error.code is not grpc.StatusCode.UNAVAILABLE
    return loaded in ("", wanted.model)


async def _ensure_model(console: Console, client: BackendClient, model: str) -> None:
    await client.check_health()
    if model:
        with console.status(f"loading {model}"):
            await client.load_model(model_options(model))
    elif not await client.has_model():
        raise NoModelError(f"no model is loaded there: name one, or {CHAT_HINT}")


async def _fetch(console: Console, model: str) -> None:
    """Fetch a model of the hub with a bar, if it is not on this machine."""
    place = await asyncio.to_thread(resolve, ModelOptions(model=model))
    if isinstance(place, HubModel) and all(
        each.name != place.repo_id for each in await asyncio.to_thread(cached_models)
    ):
        await pull(console, place.repo_id)


DEFAULT_TEMPERATURE = 0.7
# Of the field of the protocol.
MAX_TOKENS = 2**31 - 1
_UNCHOSEN = ParameterSource.DEFAULT


@click.command("chat")
@address_option
@click.argument("name", metavar="[MODEL]", default="")
@click.option("--model", default="", help="The same as MODEL.")
@token_option
@click.option("--system", default="", help="System message.")
@click.option("--think/--no-think", "thinking", default=None, help="Override the model's default.")
@click.option(
    "--temperature",
    type=FiniteRange(min=0.0),
    default=DEFAULT_TEMPERATURE,
    show_default=True,
    help="0 is greedy.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(0, MAX_TOKENS),
    default=0,
    help="Limit of a reply; without it the context is the limit.",
)
@click.option(
    "--tools",
    "tools_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON array of tools to offer; you type their results.",
)
@click.option("--weather", is_flag=True, help="Offer the demo's weather tool.")
def command(  # noqa: PLR0913 - a parameter per option
    *,
    address: str,
    name: str,
    model: str,
    token: str,
    tools_path: Path | None,
    weather: bool,
    system: str,
    thinking: bool | None,
    temperature: float,
    max_tokens: int,
) -> None:
    """Chat with a model; Ctrl-C cancels a reply.

    MODEL is a path, a hub id, or demo; without it the loaded model answers. Unless --addr is
    given, the chat starts a backend of its own if none runs, or if that has another model.
    """
    console = Console()
    chosen = click.get_current_context().get_parameter_source("address") is not _UNCHOSEN
    if name and model and name != model:
        raise click.UsageError(f"two models, {name} and {model} of --model: name one")
    wanted = Wanted(address, token, model_name(name or model), is_chosen=chosen)
    settings = ChatSettings(
        system=system,
        thinking=thinking,
        temperature=temperature,
        max_tokens=max_tokens,
        toolbox=_toolbox(console, tools_path, weather=weather),
    )
    try:
        _hold(console, wanted, settings)
    except NoModelError as error:
        raise click.UsageError(str(error)) from None
    except CallError as error:
        text = f"{address}: {explained(error, CHAT_HINT)}"
        raise click.ClickException(printable(text)) from None
    except (BackendError, DamagedError, ServerError) as error:
        raise click.ClickException(printable(str(error))) from None


def _hold(console: Console, wanted: Wanted, settings: ChatSettings) -> None:
    """Hold the conversation; each step runs on one event loop."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            partner = runner.run(stack.enter_async_context(partner_of(console, wanted)))
            place = runner.run(partner.described())
            _enable_line_editing()
            Chat(console, partner.client, runner, settings, place).run()
        finally:
            runner.run(stack.aclose())


def _toolbox(console: Console, path: Path | None, *, weather: bool) -> Toolbox | None:
    if weather:
        return weather_toolbox(console)
    if path is None:
        return None
    try:
        return read_toolbox(console, path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _enable_line_editing() -> None:
    """Enable cursor keys and a history, if Python was built with readline."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")
