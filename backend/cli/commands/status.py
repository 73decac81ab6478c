"""`status`: the state of a running backend."""

import asyncio
from contextlib import suppress

import click
from rich.console import Console

from backend.cli.client import BackendClient, CallError
from backend.cli.commands.options import address_option, token_option
from backend.cli.render import printable
from backend.cli.status import StatusSettings, explained, show_status

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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per snapshot.")
def command(
    *, address: str, token: str, watch: bool | None, interval_s: float, as_json: bool
) -> None:
    """Show the state of a running backend, like a process viewer; Ctrl-C leaves."""
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
