"""`doctor`: checks of the machine and the installation."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backend.cli.commands.options import DEFAULT_ADDRESS
from backend.cli.doctor import installation, machine, place
from backend.cli.doctor.finding import Finding, Verdict
from backend.cli.render import ERROR_STYLE, QUIET_STYLE, printable

_MARKS = {
    Verdict.GOOD: Text("ok", "green"),
    Verdict.WARNING: Text("warning", "yellow"),
    Verdict.BAD: Text("wrong", ERROR_STYLE),
}


@click.command("doctor")
@click.option(
    "--addr",
    "address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT|unix:PATH",
    help="Address that the backend will listen on.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Folder of the prompt cache on disk, as in the option cache_dir.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per finding.")
def command(*, address: str, cache_dir: Path | None, as_json: bool) -> None:
    """Check this machine and suggest fixes.

    Exit code 1 if something is wrong.
    """
    findings = list(_findings(address, cache_dir))
    if as_json:
        for finding in findings:
            click.echo(json.dumps(asdict(finding)))
    else:
        Console().print(_table(findings))
    if any(finding.verdict is Verdict.BAD for finding in findings):
        sys.exit(1)


def _findings(address: str, cache_dir: Path | None) -> Iterator[Finding]:
    yield from installation.check_python()
    yield from installation.check_packages()
    yield from installation.check_extras()
    yield from machine.check_device(os.environ)
    yield from machine.check_blas(os.environ)
    yield from machine.check_memory()
    yield from place.check_address(address)
    yield from place.check_models(os.environ)
    yield from place.check_cache(cache_dir)
    yield from place.check_host()


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    # A command is whole, however narrow the terminal.
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(printable(finding.text))
        if finding.remedy:
            text.append(printable(f"\n→ {finding.remedy}"), QUIET_STYLE)
        table.add_row(_MARKS[finding.verdict], printable(finding.subject), text)
    return table
