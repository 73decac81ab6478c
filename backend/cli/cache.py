"""The prompt cache of a running backend on the terminal: its numbers and its tree."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from backend.cli.client import address_option, asked, token_option
from backend.cli.render import LABEL_STYLE, QUIET_STYLE, facts_table, printable
from backend.cli.status import disk_cache_facts, plain, prompt_cache_facts, share
from backend.config import LISTED_PREFIXES, MAX_LISTED_PREFIXES
from backend.pb import backend_pb2 as pb

BARS = "▁▂▃▄▅▆▇█"
SPAN_S = 300.0


def arranged(prefixes: Iterable[pb.PrefixReport]) -> Iterator[tuple[pb.PrefixReport, str]]:
    """Yield each prefix, below its parent, with the lines drawn before it.

    The best come first. A conversation is a column: prefixes are indented only at branches.
    """
    below: dict[int, list[pb.PrefixReport]] = defaultdict(list)
    for prefix in prefixes:
        below[prefix.parent].append(prefix)
    pending = [(prefix, "", "") for prefix in _worst_first(below[0])]
    while pending:
        prefix, drawn, indent = pending.pop()
        yield prefix, drawn
        children = _worst_first(below[prefix.number])
        branch, below_it = ("├ ", "│ ") if len(children) > 1 else ("", "")
        pending += [(child, indent + branch, indent + below_it) for child in children]


def reuse_bars(spans: Sequence[pb.ReuseReport]) -> str:
    """Return a bar for each span of time, the oldest first; a blank without requests."""
    if not spans:
        return ""
    newest = min(spans, key=lambda span: span.age_s).age_s
    bars = {round((span.age_s - newest) / SPAN_S): _bar(span) for span in spans}
    return "".join(bars.get(age, " ") for age in range(max(bars), -1, -1))


def _bar(span: pb.ReuseReport) -> str:
    share = span.hit_tokens / max(span.looked_up_tokens, 1)
    return BARS[min(int(share * len(BARS)), len(BARS) - 1)]


def _worst_first(prefixes: Iterable[pb.PrefixReport]) -> list[pb.PrefixReport]:
    return sorted(prefixes, key=lambda prefix: (prefix.is_pinned, prefix.worth))


def report(reply: pb.InspectPromptCacheReply, *, has_words: bool) -> RenderableType:
    """Return the counts, the prefixes and the recomputed tokens."""
    parts: list[RenderableType] = [_facts(reply)]
    if reply.prefixes:
        parts += [Text(), _prefixes(reply, has_words=has_words)]
    if left := reply.books.nodes - len(reply.prefixes):
        parts.append(Text(f"and {left:,} more nodes, of less worth; see --nodes", QUIET_STYLE))
    if reply.recomputed:
        parts += [Text(), _recomputed(reply, has_words=has_words)]
    return Group(*parts)


def _facts(reply: pb.InspectPromptCacheReply) -> Table:
    facts = facts_table()
    facts.add_row("cache", prompt_cache_facts(reply.books))
    if reply.books.disk.bytes:
        facts.add_row("disk", disk_cache_facts(reply.books.disk))
    if bars := reuse_bars(reply.spans):
        latest = reply.spans[-1]
        now = share(latest.hit_tokens, latest.looked_up_tokens)
        facts.add_row("reused", Text(f"{bars} {now} recently; a bar is five minutes"))
    if lost := " · ".join(_losses(reply)):
        facts.add_row("lost", lost)
    return facts


def _losses(reply: pb.InspectPromptCacheReply) -> Iterator[str]:
    if reply.recomputed_tokens:
        yield f"{reply.recomputed_tokens:,} tokens computed again after they were evicted"
    if reply.stateless_tokens:
        yield f"{reply.stateless_tokens:,} computed again for want of a state to go on from"


def _table(*numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style=LABEL_STYLE)
    table.add_column("prefix", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _prefixes(reply: pb.InspectPromptCacheReply, *, has_words: bool) -> Table:
    table = _table("from", "tokens", "bytes", "hits", "idle", "worth")
    table.add_column("lies in", no_wrap=True)
    if has_words:
        table.add_column("words", no_wrap=True, overflow="ellipsis")
    for prefix, drawn in arranged(reply.prefixes):
        label = drawn + printable(prefix.place)
        table.add_row(label, *_cells(prefix), *([_words(prefix.words)] if has_words else []))
    return table


def _cells(prefix: pb.PrefixReport) -> Iterator[str]:
    yield f"{prefix.start:,}"
    yield f"{prefix.tokens:,}"
    yield decimal(prefix.bytes)
    yield f"{prefix.hits:,}"
    yield f"{prefix.idle_requests:,}"
    yield f"{prefix.worth:,.1f}"
    yield ", ".join(_places(prefix))


def _recomputed(reply: pb.InspectPromptCacheReply, *, has_words: bool) -> Table:
    table = _table("from", "tokens", "times", "tokens in all")
    if has_words:
        table.add_column("words", no_wrap=True, overflow="ellipsis")
    for each in reply.recomputed:
        counts = (each.start, each.tokens, each.times, each.recomputed_tokens)
        cells = ["computed again", *(f"{count:,}" for count in counts)]
        table.add_row(*cells, *([_words(each.words)] if has_words else []))
    return table


def _places(prefix: pb.PrefixReport) -> Iterator[str]:
    yield "memory"
    if prefix.is_on_disk:
        yield "disk"
    if prefix.is_pinned:
        yield "pinned"
    if prefix.is_in_use:
        yield "in use"
    if prefix.has_state:
        yield "with state"


def _words(words: str) -> Text:
    return Text(printable(" ".join(words.split())))


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
    reply = asked(address, token, lambda client: client.prompt_cache(request))
    if as_json:
        click.echo(json.dumps(plain(reply)))
    else:
        _show(reply, has_words=request.words)


def _show(reply: pb.InspectPromptCacheReply, *, has_words: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    console.print(report(reply, has_words=has_words))
