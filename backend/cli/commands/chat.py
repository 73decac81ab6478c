"""`chat`: a conversation at the terminal."""

import asyncio
import importlib
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

from backend.cli.chat import Chat, ChatSettings
from backend.cli.chat_server import CHAT_HINT, NoModelError, Wanted, partner_of
from backend.cli.client import CallError, explained
from backend.cli.commands.options import address_option, token_option
from backend.cli.hub_models import DamagedError
from backend.cli.render import printable
from backend.cli.server_process import ServerError
from backend.cli.tools import Toolbox, read_toolbox, weather_toolbox
from backend.errors import BackendError

DEFAULT_TEMPERATURE = 0.7
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
    type=click.FloatRange(min=0.0),
    default=DEFAULT_TEMPERATURE,
    show_default=True,
    help="0 is greedy.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
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
    wanted = Wanted(address, token, name or model, is_chosen=chosen)
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
