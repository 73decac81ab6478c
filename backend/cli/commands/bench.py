"""`bench`: the speed of a running backend."""

import asyncio
import json

import click
from rich.console import Console
from rich.table import Table

from backend.cli.bench.figures import Figures, Spread
from backend.cli.bench.run import Load, measure
from backend.cli.client import BackendClient, CallError, explained
from backend.cli.commands.options import address_option, token_option
from backend.cli.inspection import inspect
from backend.cli.render import LABEL_STYLE, printable

MAX_STREAMS, MAX_ROUNDS, MAX_TOKENS = 256, 100, 2**20


@click.command("bench")
@address_option
@token_option
@click.option(
    "--streams",
    type=click.IntRange(1, MAX_STREAMS),
    default=4,
    show_default=True,
    help="Requests that start together.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=512,
    show_default=True,
    help="Approximate length of each prompt.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2, MAX_TOKENS),
    default=64,
    show_default=True,
    help="Length of each reply.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, MAX_ROUNDS),
    default=3,
    show_default=True,
    help="Number of rounds, one after another.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(address: str, token: str, *, as_json: bool, **load: int) -> None:
    """Measure the speed of a running backend.

    The client measures; the backend is busy meanwhile.
    """
    console = Console()
    try:
        with console.status("measuring"):
            model, figures = asyncio.run(_measured(address, token, Load(**load)))
    except CallError as error:
        raise click.ClickException(printable(f"{address}: {explained(error)}")) from None
    if as_json:
        click.echo(json.dumps({"model": model, **load, "measured": figures.plain()}))
    else:
        console.print(_table(model, Load(**load), figures))


async def _measured(address: str, token: str, load: Load) -> tuple[str, Figures]:
    async with BackendClient(address, token) as client:
        report = (await inspect(client)).report
        return report.model.name, Figures.of(await measure(client, load))


def _table(model: str, load: Load, figures: Figures) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=LABEL_STYLE)
    table.add_column()
    if model:
        table.add_row("model", printable(model))
    prompts, replies = _range(*figures.prompt_tokens), _range(*figures.tokens)
    load_text = f"{load.streams} streams, {load.rounds} rounds · prompts of {prompts} tokens"
    table.add_row("load", f"{load_text} · replies of {replies}")
    table.add_row("together", f"{figures.tokens_per_s:,.1f} tokens/s, prompts included")
    if figures.stream_tokens_per_s is not None:
        table.add_row("a stream", f"{figures.stream_tokens_per_s:,.1f} tokens/s, after the first")
    for name, spread in (("first text", figures.first_token_ms), ("gaps", figures.gap_ms)):
        if spread is not None:
            table.add_row(name, _spread(spread))
    return table


def _spread(spread: Spread) -> str:
    values = (spread.p50, spread.p99, spread.largest)
    p50, p99, largest = (f"{value:,.1f}" for value in values)
    return f"p50 {p50} ms · p99 {p99} ms · longest {largest} ms · of {spread.count:,}"


def _range(fewest: int, most: int) -> str:
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
