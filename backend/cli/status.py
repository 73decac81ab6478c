"""The status command: what a backend does, once or again and again."""

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
    """How the status is shown.

    Attributes:
        watches: Whether it is shown again and again, until it is interrupted.
        interval_s: How long after each other.
        as_json: One JSON object per look, in a line of its own.
    """

    watches: bool
    interval_s: float
    as_json: bool


async def show_status(console: Console, client: BackendClient, settings: StatusSettings) -> None:
    """Show what a backend does, as often as the settings say.

    Raises:
        CallError: It cannot be reached, refuses the token, or tells nothing.
    """
    with _screen(console, settings) as show:
        show(await inspect(client))
        while settings.watches:
            await asyncio.sleep(settings.interval_s)
            show(await inspect(client))


def explained(error: CallError) -> str:
    """Return an error of `show_status` in one line, in plain words first where there are any."""
    explanation = _EXPLANATIONS.get(error.code) if error.code else None
    return f"{explanation} ({error})" if explanation else str(error)


@contextmanager
def _screen(console: Console, settings: StatusSettings) -> Iterator[Show]:
    """Show each look in place of the one before on a terminal, below it elsewhere."""
    if settings.as_json:
        yield lambda inspection: click.echo(json.dumps(plain(inspection.report)))
    elif settings.watches and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda inspection: live.update(dashboard(inspection), refresh=True)
    else:
        yield lambda inspection: console.print(dashboard(inspection))
