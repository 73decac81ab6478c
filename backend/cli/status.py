"""The status command: a backend's state, once or repeatedly."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import click
import grpc
from google.protobuf.message import Message
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from backend.cli.app import FiniteRange
from backend.cli.client import BackendClient, CallError, address_option, asked, token_option
from backend.cli.render import ERROR_STYLE, LABEL_STYLE, QUIET_STYLE, facts_table, printable
from backend.core.metric_table import METRICS, totals
from backend.pb import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Inspection:
    """One snapshot of a backend.

    Attributes:
        is_whole: Whether it has `Inspect`; others report only state, memory and totals.
    """

    report: pb.InspectReply
    is_whole: bool = True


async def inspect(client: BackendClient) -> Inspection:
    """Return a snapshot of the backend."""
    try:
        return Inspection(await client.inspect())
    except CallError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    return Inspection(await client.counters(), is_whole=False)


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values, `None` for a part that is absent.

    Numbers stay numbers, whereas protobuf's own JSON turns 64-bit ones into text.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.enum_type is not None:
            values[field.name] = field.enum_type.values_by_number[value].name
        elif field.has_presence and not message.HasField(field.name):
            values[field.name] = None
        else:
            values[field.name] = _plain_value(value)
    return values


def _plain_value(value: object) -> object:
    match value:
        case Message():
            return plain(value)
        case Mapping():
            return dict(value)
        case str():
            return value
        case Sequence():
            return [_plain_value(element) for element in value]
        case _:
            return value


MEMORY_BAR_WIDTH = 24
PREFILL_BAR_WIDTH = 12
# Of the memory, besides its total.
_MAIN_PARTS = ("weights", "kv_active", "prompt_cache")
BAR_STYLE, BAR_BACK_STYLE = "cyan", "bright_black"
SEPARATOR = " · "
# A shorter turn of the engine is normal.
SHOWN_TURN_S = 2.0

_STATE_STYLES = {
    pb.StatusResponse.UNINITIALIZED: QUIET_STYLE,
    pb.StatusResponse.BUSY: "yellow",
    pb.StatusResponse.READY: "green",
    pb.StatusResponse.ERROR: ERROR_STYLE,
}
# The order in which requests are listed: those in progress come first.
_PHASE_STYLES = {"active": "green", "prefilling": "yellow", "waiting": QUIET_STYLE}


def dashboard(inspection: Inspection, *, all_memory: bool = False) -> RenderableType:
    """Return the frame of one snapshot; unless asked for all, with the main parts of the memory."""
    facts = facts_table(_facts(inspection, all_memory=all_memory))
    requests = inspection.report.requests
    return Group(facts, Text(), _Requests(requests)) if requests else facts


def _facts(inspection: Inspection, *, all_memory: bool) -> Iterator[tuple[str, RenderableType]]:
    report = inspection.report
    if not inspection.is_whole:
        yield "note", "this backend does not know Inspect and tells no more than this"
    is_loaded = report.HasField("model")
    if is_loaded:
        yield "model", _model(report.model)
    yield "state", _state(report)
    if report.processes:
        yield "processes", _processes(report)
    yield "memory", _memory(report.memory, all_parts=all_memory)
    if report.HasField("machine"):
        yield "machine", _machine(report.machine)
    if is_loaded:
        yield "cache", prompt_cache_facts(report.prompt_cache)
    if report.prompt_cache.disk.bytes:
        yield "disk", disk_cache_facts(report.prompt_cache.disk)
    yield "totals", _totals(report)


def _model(model: pb.ModelReport) -> Text:
    context = f"context {model.context_length:,}" if model.context_length else "no context limit"
    facts = f"{model.name} ({model.type}){SEPARATOR}{context}"
    place = f"\n{model.path}" if model.path != model.name else ""
    return Text.assemble(printable(facts), (printable(place), QUIET_STYLE))


def _state(report: pb.InspectReply) -> Text:
    state = (pb.StatusResponse.State.Name(report.state), _STATE_STYLES[report.state])
    if not report.HasField("model"):
        return Text.assemble(state)
    if report.turn_s >= SHOWN_TURN_S:
        state = (f"{state[0]}, in one turn for {report.turn_s:,.0f} s", state[1])
    slots = f"{report.slots_taken} of {report.model.max_slots} slots taken"
    return Text.assemble(state, SEPARATOR, slots, SEPARATOR, f"{report.waiting} waiting")


def _processes(report: pb.InspectReply) -> Text:
    """Return each process with its memory, and the lost engines."""
    text = SEPARATOR.join(
        f"{process.role} {process.process_id}"
        + (f" {decimal(process.resident_bytes)}" if process.resident_bytes else "")
        for process in report.processes
    )
    if not report.restarts:
        return Text(printable(text))
    losses = f"{report.restarts:,} engines lost, {report.lost_s:,.1f} s in all"
    reasons = "".join(f"\n{restart.reason}" for restart in report.latest_restarts[-1:])
    return Text(printable(f"{text}\n{losses}{reasons}"))


def _memory(memory: pb.MemoryUsageData, *, all_parts: bool) -> Table:
    """Return a bar per part; the parts overlap, and the longest bar is the largest of them.

    Where both processes are known, the first is theirs, and MLX's memory is a part of it.
    """
    main = {name: memory.breakdown[name] for name in _MAIN_PARTS if name in memory.breakdown}
    shown = main if main and not all_parts else dict(sorted(memory.breakdown.items()))
    bars = Table.grid(padding=(0, 2))
    bars.add_column()
    bars.add_column(justify="right")
    parts = {"total": memory.total, **shown}
    if resident := memory.breakdown.get("resident"):
        parts = {"resident": resident, "mlx": memory.total, **shown}
    largest = max(parts.values())
    for part, size in parts.items():
        bars.add_row(Text(printable(part)), decimal(size), _bar(size, largest, MEMORY_BAR_WIDTH))
    return bars


def _machine(machine: pb.MachineReport) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    claimed = sum(backend.held_bytes + backend.budget_bytes for backend in machine.backends)
    for backend in machine.backends:
        rows.add_row(*_shares(backend))
    head = f"{decimal(claimed)} of {decimal(machine.usable_bytes)} claimed"
    return Group(head, rows, *map(Text, _budget(machine)))


def _budget(machine: pb.MachineReport) -> Iterator[str]:
    """Yield the line that says why this backend's budget is smaller than the machine's memory."""
    own = next((backend for backend in machine.backends if backend.is_own), None)
    if own is None or not own.budget_bytes:
        return
    others = [backend for backend in machine.backends if not backend.is_own]
    theirs = sum(backend.held_bytes + backend.budget_bytes for backend in others)
    free = machine.usable_bytes - own.held_bytes - theirs - own.budget_bytes
    parts = [f"{decimal(own.held_bytes)} held here"]
    if others:
        parts.append(f"{decimal(theirs)} of {len(others)} other{'' if len(others) == 1 else 's'}")
    if free > 0:
        parts.append(f"{decimal(free)} kept free")
    whole = decimal(machine.usable_bytes)
    yield f"{whole} less {', '.join(parts)}: {decimal(own.budget_bytes)} for KV here"


def _shares(backend: pb.BackendReport) -> Iterator[RenderableType]:
    name = f"{backend.model} ({'this one' if backend.is_own else backend.process_id})"
    yield Text(printable(name), "" if backend.is_busy else QUIET_STYLE)
    yield f"{decimal(backend.held_bytes)} held"
    taken = decimal(backend.reserved_bytes + backend.cached_bytes)
    yield f"{taken} of {decimal(backend.budget_bytes)} KV"
    yield f"wants {decimal(backend.wanted_bytes)}" if backend.wanted_bytes else ""


def prompt_cache_facts(books: pb.PromptCacheReport) -> Text:
    """Return the counts of the prompt cache in two lines."""
    if not books.budget_bytes:
        return Text("switched off")
    hits = ", ".join(f"{kind} {count:,}" for kind, count in sorted(books.hits.items()))
    room = f"{decimal(books.bytes)} of {decimal(books.budget_bytes)}"
    content = f"{books.nodes:,} nodes, {books.tokens:,} tokens, {books.evictions:,} evictions"
    reuse = share(books.hit_tokens, books.looked_up_tokens)
    rate = f"{reuse} of {books.looked_up_tokens:,} prompt tokens reused"
    use = f"{rate}{SEPARATOR}{hits}" if hits else rate
    return Text(printable(f"{room}{SEPARATOR}{content}\n{use}"))


def disk_cache_facts(books: pb.DiskCacheReport) -> str:
    """Return the counts of its files in one line."""
    files = f"{decimal(books.bytes)}{SEPARATOR}{books.files:,} files of this model"
    troubles = f"{books.damaged:,} damaged, {books.dropped:,} not written"
    return SEPARATOR.join([files, f"{books.read_tokens:,} tokens read", troubles])


def _totals(report: pb.InspectReply) -> str:
    values = {metric.name: metric.value for metric in report.metrics}
    # Other backends have the fields only.
    fields = {name: getattr(report, name) for name in METRICS if hasattr(report, name)}
    return SEPARATOR.join(totals(values or fields))


class _Requests:
    """The table of requests, with the columns that the terminal has room for."""

    def __init__(self, requests: Iterable[pb.RequestReport]) -> None:
        self._requests = requests

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [column for column in _COLUMNS if options.max_width >= column.least_width]
        table = Table(box=None, pad_edge=False, header_style=LABEL_STYLE)
        for column in columns:
            # On a narrow terminal the first one shrinks.
            is_first = column is columns[0]
            table.add_column(column.name, justify=column.justify, no_wrap=not is_first)
        ranks = {phase: rank for rank, phase in enumerate(_PHASE_STYLES)}
        for request in sorted(self._requests, key=lambda each: ranks.get(each.phase, len(ranks))):
            table.add_row(*(column.cell(request) for column in columns))
        yield table


def _cached(request: pb.RequestReport) -> Text:
    cached = share(request.cached_tokens, request.prompt_tokens)
    return Text(printable(f"{cached} {request.hit_kind}"))


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the requests, for terminals of at least this many characters."""

    name: str
    cell: Callable[[pb.RequestReport], RenderableType]
    justify: Literal["left", "right"] = "right"
    least_width: int = 0


_COLUMNS = (
    _Column(
        "request",
        lambda each: Text(printable(each.request_id), no_wrap=True, overflow="ellipsis"),
        "left",
    ),
    _Column(
        "phase",
        lambda each: Text(printable(each.phase), _PHASE_STYLES.get(each.phase, "")),
        "left",
    ),
    _Column(
        "prefill",
        lambda each: _bar(each.prefilled_tokens, each.prompt_tokens, PREFILL_BAR_WIDTH),
        "left",
        least_width=92,
    ),
    _Column("prompt", lambda each: f"{each.prompt_tokens:,}"),
    _Column("cached", _cached),
    _Column("KV", lambda each: decimal(each.kv_bytes) if each.kv_bytes else "", least_width=80),
    _Column("tokens", lambda each: f"{each.generated_tokens:,}"),
    _Column("tokens/s", lambda each: f"{each.tokens_per_s:.1f}" if each.generated_tokens else ""),
    _Column(
        "first ms",
        lambda each: f"{each.first_token_ms:,.0f}" if each.generated_tokens else "",
        least_width=70,
    ),
)


def _bar(part: int, whole: int, width: int) -> ProgressBar:
    return ProgressBar(
        whole,
        part,
        width=width,
        style=BAR_BACK_STYLE,
        complete_style=BAR_STYLE,
        finished_style=BAR_STYLE,
    )


def share(part: int, whole: int) -> str:
    """Return a part as a percentage of the whole."""
    return f"{part / whole:.0%}" if whole else "0%"


_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
GONE = "no backend answers; waiting for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    """The settings of the status command.

    Attributes:
        watches: Whether it repeats until interrupted.
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


DEFAULT_INTERVAL_S = 1.0


@click.command("status")
@address_option
@token_option
@click.option("--watch/--once", default=None, help="Default: watch on a terminal, else once.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.1),
    default=DEFAULT_INTERVAL_S,
    show_default=True,
    help="Seconds between two snapshots.",
)
@click.option("--memory", "all_memory", is_flag=True, help="Show every part of the memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per snapshot.")
def command(*, address: str, token: str, watch: bool | None, **shown: Any) -> None:  # noqa: ANN401
    """Show the state of a running backend; Ctrl-C leaves."""
    console = Console()
    watches = console.is_terminal if watch is None else watch
    settings = StatusSettings(watches=watches, **shown)
    with suppress(KeyboardInterrupt):
        asked(address, token, lambda client: show_status(console, client, settings))
