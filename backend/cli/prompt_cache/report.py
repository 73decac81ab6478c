"""The prompt cache, as tables."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from backend.cli.dashboard import disk_cache_facts, prompt_cache_facts, share
from backend.cli.prompt_cache.layout import arranged, reuse_bars
from backend.cli.render import LABEL_STYLE, QUIET_STYLE, printable
from backend.pb import backend_pb2 as pb


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
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=LABEL_STYLE)
    facts.add_column()
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
