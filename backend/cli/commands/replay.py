"""`replay`: recorded replies, replayed."""

import sys
from typing import BinaryIO

import click

from backend.cli.replay import Cut, parse_cut, replay


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
