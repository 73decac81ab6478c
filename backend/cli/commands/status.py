"""`status`: the state of a running backend."""

import asyncio
from contextlib import suppress
from typing import Any

import click
from rich.console import Console

from backend.cli.client import BackendClient, CallError, explained
from backend.cli.commands.options import address_option, token_option
from backend.cli.render import printable
from backend.cli.status import StatusSettings, show_status

DEFAULT_INTERVAL_S = 1.0


@click.command("status")
@address_option
@token_option
@click.option("--watch/--once", default=None, help="Default: watch on a terminal, else once.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=DEFAULT_INTERVAL_S,
    show_default=True,
    help="Seconds between two snapshots.",
)
@click.option("--memory", "all_memory", is_flag=True, help="Show every part of the memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per snapshot.")
def command(*, address: str, token: str, watch: bool | None, **shown: Any) -> None:  # noqa: ANN401
    """Show the state of a running backend; Ctrl-C leaves."""
    console = Console()
    watches = console.is_terminal if watch is None else watch
    settings = StatusSettings(watches=watches, **shown)
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
