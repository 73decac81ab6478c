"""`cache`: the prompt cache of a running backend."""

import asyncio
import json
from typing import Any

import click
from rich.console import Console

from backend.cli.client import BackendClient, CallError, explained
from backend.cli.commands.options import address_option, token_option
from backend.cli.inspection import plain
from backend.cli.prompt_cache.report import report
from backend.cli.render import printable
from backend.config import LISTED_PREFIXES, MAX_LISTED_PREFIXES
from backend.pb import backend_pb2 as pb

# Without a screen, nothing need be cut to its width.
PLAIN_WIDTH = 200


@click.command("cache")
@address_option
@token_option
@click.option(
    "--nodes",
    "max_prefixes",
    type=click.IntRange(1, MAX_LISTED_PREFIXES),
    default=LISTED_PREFIXES,
    show_default=True,
    help="Number of nodes to list, the most valuable ones.",
)
@click.option(
    "--words",
    is_flag=True,
    help="Show the first words of each; needs a backend with a token.",
)
@click.option(
    "--scope",
    "cache_scope",
    default="",
    metavar="NAME",
    help="With --words, also show those of requests with this cache_scope.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, address: str, token: str, as_json: bool, **wanted: Any) -> None:  # noqa: ANN401 - of the message
    """Show the prompt cache of a running backend.

    Also the tokens that were computed again.
    """
    request = pb.InspectPromptCacheRequest(**wanted)
    try:
        reply = asyncio.run(_asked(address, token, request))
    except CallError as error:
        raise click.ClickException(printable(f"{address}: {explained(error)}")) from None
    if as_json:
        click.echo(json.dumps(plain(reply)))
    else:
        _show(reply, has_words=request.words)


def _show(reply: pb.InspectPromptCacheReply, *, has_words: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    console.print(report(reply, has_words=has_words))


async def _asked(
    address: str, token: str, request: pb.InspectPromptCacheRequest
) -> pb.InspectPromptCacheReply:
    async with BackendClient(address, token) as client:
        return await client.prompt_cache(request)
