"""`chat`: a conversation at the terminal."""

import asyncio
import importlib
import sys
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console

from backend.cli.chat import Chat, ChatSettings
from backend.cli.client import BackendClient, CallError
from backend.cli.commands.options import address_option, token_option
from backend.cli.conversation import model_options
from backend.cli.render import printable
from backend.cli.tools import Toolbox, read_toolbox, weather_toolbox

DEFAULT_TEMPERATURE = 0.7


@click.command("chat")
@address_option
@click.option("--model", help="Path or hub id to load first; without it the loaded model answers.")
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
    model: str | None,
    token: str,
    tools_path: Path | None,
    weather: bool,
    system: str,
    thinking: bool | None,
    temperature: float,
    max_tokens: int,
) -> None:
    """Chat with a running backend; Ctrl-C cancels a reply."""
    console = Console()
    settings = ChatSettings(
        system=system,
        thinking=thinking,
        temperature=temperature,
        max_tokens=max_tokens,
        toolbox=_toolbox(console, tools_path, weather=weather),
    )
    with asyncio.Runner() as runner:
        client = runner.run(_connected(address, token))
        try:
            runner.run(_ensure_model(console, client, model))
            _enable_line_editing()
            Chat(console, client, runner, settings).run()
        except CallError as error:
            raise click.ClickException(printable(f"{address}: {error}")) from None
        finally:
            runner.run(client.close())


async def _connected(address: str, token: str) -> BackendClient:
    return BackendClient(address, token)


async def _ensure_model(console: Console, client: BackendClient, model: str | None) -> None:
    await client.check_health()
    if model is not None:
        with console.status(f"loading {model}"):
            await client.load_model(model_options(model))
    elif not await client.has_model():
        raise click.UsageError("no model is loaded: name one with --model")


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
