"""The status command: a backend's state, once or repeatedly."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import click
import grpc
from rich.console import Console
from rich.live import Live

from backend.cli.client import BackendClient, CallError
from backend.cli.dashboard import dashboard
from backend.cli.inspection import Inspection, inspect, plain

Show: TypeAlias = Callable[[Inspection], None]

_EXPLANATIONS = {
    grpc.StatusCode.UNAVAILABLE: "no backend answers there",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it does not answer",
    grpc.StatusCode.UNAUTHENTICATED: "the token is missing or wrong, see --token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    """The settings of the status command.

    Attributes:
        watches: Whether it repeats until interrupted.
        interval_s: Seconds between two snapshots.
        as_json: Whether to print one JSON object per snapshot, on its own line.
    """

    watches: bool
    interval_s: float
    as_json: bool


async def show_status(console: Console, client: BackendClient, settings: StatusSettings) -> None:
    """Show the state of a backend, as often as the settings say.

    Raises:
        CallError: It cannot be reached, refuses the token, or returns nothing.
    """
    with _screen(console, settings) as show:
        show(await inspect(client))
        while settings.watches:
            await asyncio.sleep(settings.interval_s)
            show(await inspect(client))


def explained(error: CallError) -> str:
    """Return an error of `show_status` in one line, in plain words if possible."""
    explanation = _EXPLANATIONS.get(error.code) if error.code else None
    return f"{explanation} ({error})" if explanation else str(error)


@contextmanager
def _screen(console: Console, settings: StatusSettings) -> Iterator[Show]:
    """Show each snapshot in place of the previous one on a terminal, below it elsewhere."""
    if settings.as_json:
        yield lambda inspection: click.echo(json.dumps(plain(inspection.report)))
    elif settings.watches and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda inspection: live.update(dashboard(inspection), refresh=True)
    else:
        yield lambda inspection: console.print(dashboard(inspection))
