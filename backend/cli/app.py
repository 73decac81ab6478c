"""The command line: its commands, their options, and errors in one line."""

import asyncio
import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console

from backend.cli.chat import Chat, ChatSettings
from backend.cli.client import BackendClient, CallError
from backend.cli.conversation import model_options
from backend.cli.demo import DemoError, run_demo
from backend.cli.render import printable
from backend.cli.replay import Cut, parse_cut
from backend.cli.replay import replay as replay_lines
from backend.cli.status import StatusSettings, explained, show_status
from backend.cli.tools import Toolbox, read_toolbox, weather_toolbox

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TEMPERATURE = 0.7
DEFAULT_INTERVAL_S = 1.0

address_option = click.option(
    "--addr", "address", default=DEFAULT_ADDRESS, show_default=True, metavar="HOST:PORT"
)
token_option = click.option(
    "--token",
    default="",
    envvar="LOCALAI_GRPC_AUTH_TOKEN",
    help="Bearer token of the backend.  [env: LOCALAI_GRPC_AUTH_TOKEN]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Talk to an MLX backend."""


@main.command()
@token_option
def demo(token: str) -> None:
    """Run the embedded model: a thought, a tool call and its answer, over a real socket."""
    try:
        asyncio.run(run_demo(Console(), token))
    except DemoError as error:
        raise click.ClickException(printable(str(error))) from None


@main.command()
@address_option
@click.option("--model", help="Path or hub id to load first; without it the loaded model answers.")
@token_option
@click.option("--system", default="", help="System message.")
@click.option("--think/--no-think", "thinking", default=None, help="Overrule the model's default.")
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
    help="JSON array of tools to offer; you type what they return.",
)
@click.option("--weather", is_flag=True, help="Offer the demo's weather tool.")
def chat(  # noqa: PLR0913 - a parameter per option
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


@main.command()
@address_option
@token_option
@click.option("--watch/--once", default=None, help="Default: watch on a terminal, else once.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=DEFAULT_INTERVAL_S,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per look.")
def status(
    *, address: str, token: str, watch: bool | None, interval_s: float, as_json: bool
) -> None:
    """Show what a running backend does, like a process viewer; Ctrl-C leaves."""
    console = Console()
    settings = StatusSettings(
        watches=console.is_terminal if watch is None else watch,
        interval_s=interval_s,
        as_json=as_json,
    )
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_show_status(console, address, token, settings))
    except CallError as error:
        raise click.ClickException(printable(f"{address}: {explained(error)}")) from None


async def _show_status(
    console: Console, address: str, token: str, settings: StatusSettings
) -> None:
    async with BackendClient(address, token) as client:
        await show_status(console, client, settings)


@main.command()
@click.argument("source", type=click.File("rb"), default="-", metavar="[FILE]")
@click.option(
    "--cut",
    callback=parse_cut,
    metavar="N|random:SEED",
    help="Cut the text anew, into chunks of N characters or of random lengths.",
)
def replay(source: BinaryIO, cut: Cut) -> None:
    """Play recorded replies again: JSON lines from FILE or standard input, without a model."""
    if not replay_lines(source, cut):
        sys.exit(1)


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
    """Give a terminal's prompt cursor keys and a history, where Python was built with them."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")
