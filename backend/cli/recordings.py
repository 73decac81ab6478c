"""Replays recorded replies: JSON lines in, JSON lines out."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, TypeAlias

import click

from backend.output.replay import (
    Recording,
    RecordingError,
    cut_evenly,
    cut_randomly,
    read_recording,
    report,
)

Cut: TypeAlias = Callable[[Recording], Sequence[str]]

_RANDOM = "random:"


def replay(lines: Iterable[bytes], cut: Cut) -> bool:
    """Replay all recordings; invalid lines are reported on standard error and skipped.

    Returns:
        Whether all lines were valid.
    """
    is_good = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            recording = read_recording(line)
        except RecordingError as error:
            click.echo(f"line {number}: {error}", file=sys.stderr)
            is_good = False
            continue
        click.echo(json.dumps(report(recording, cut(recording))))
    return is_good


def as_recorded(recording: Recording) -> Sequence[str]:
    """Return the chunks as they are."""
    return recording.chunks


def parse_cut(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Cut:
    """Read `--cut`: a length in characters, or `random:` and a seed."""
    if value is None:
        return as_recorded
    if value.startswith(_RANDOM):
        seed = value.removeprefix(_RANDOM)
        return lambda recording: cut_randomly("".join(recording.chunks), seed)
    if not value.isdecimal() or not int(value):
        raise click.BadParameter(f"{value!r} is neither a length nor {_RANDOM}SEED")
    return lambda recording: cut_evenly("".join(recording.chunks), int(value))


@click.command("replay")
@click.argument("source", type=click.File("rb"), default="-", metavar="[FILE]")
@click.option(
    "--cut",
    callback=parse_cut,
    metavar="N|random:SEED",
    help="Cut the text into chunks of N characters or of random lengths.",
)
def command(source: BinaryIO, cut: Cut) -> None:
    """Replay recorded replies, without a model.

    They are JSON lines from FILE or standard input.
    """
    if not replay(source, cut):
        sys.exit(1)
