"""The status command: a backend's state, once or repeatedly."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import click
import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from backend.cli.client import BackendClient, CallError
from backend.cli.dashboard import dashboard
from backend.cli.inspection import Inspection, inspect, plain
from backend.cli.render import ERROR_STYLE

_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
GONE = "no backend answers; waiting for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    """The settings of the status command.

    Attributes:
        watches: Whether it repeats until interrupted.
        interval_s: Seconds between two snapshots.
        as_json: Whether to print one JSON object per snapshot, on its own line.
        all_memory: Whether to show every part of the memory instead of the main ones.
    """

    watches: bool
    interval_s: float
    as_json: bool
    all_memory: bool = False


@dataclass(frozen=True, slots=True)
class _Screen:
    """Where snapshots appear, and notes between them."""

    show: Callable[[Inspection], None]
    note: Callable[[str], None]


async def show_status(console: Console, client: BackendClient, settings: StatusSettings) -> None:
    """Show the state of a backend, as often as the settings say.

    A backend that has answered once may be away for a while, as during a restart.

    Raises:
        CallError: It cannot be reached, refuses the token, or returns nothing.
    """
    with _screen(console, settings) as screen:
        screen.show(await inspect(client))
        while settings.watches:
            await asyncio.sleep(settings.interval_s)
            await _refresh(screen, client)


async def _refresh(screen: _Screen, client: BackendClient) -> None:
    try:
        screen.show(await inspect(client))
    except CallError as error:
        if error.code not in _PASSING:
            raise
        screen.note(GONE)


@contextmanager
def _screen(console: Console, settings: StatusSettings) -> Iterator[_Screen]:
    """Show each snapshot in place of the previous one on a terminal, below it elsewhere."""
    frame = partial(dashboard, all_memory=settings.all_memory)
    if settings.as_json:
        yield _Screen(
            lambda inspection: click.echo(json.dumps(plain(inspection.report))),
            partial(click.echo, err=True),
        )
    elif settings.watches and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield _Screen(
                lambda inspection: live.update(frame(inspection), refresh=True),
                lambda text: live.update(Text(text, ERROR_STYLE), refresh=True),
            )
    else:
        yield _Screen(lambda inspection: console.print(frame(inspection)), console.print)
