"""`demo`: the main job on the embedded model."""

import asyncio

import click
from rich.console import Console

from backend.cli.commands.options import token_option
from backend.cli.demo import DemoError, run_demo
from backend.cli.render import printable


@click.command("demo")
@token_option
def command(token: str) -> None:
    """Run the embedded model once, from start to end.

    A thought, a tool call and its answer, over a real socket.
    """
    try:
        asyncio.run(run_demo(Console(), token))
    except DemoError as error:
        raise click.ClickException(printable(str(error))) from None
