"""One frame of the status command, like a process viewer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from backend.cli.inspection import Inspection
from backend.cli.render import ERROR_STYLE, LABEL_STYLE, QUIET_STYLE, printable
from backend.core.metric_table import METRICS, totals
from backend.pb import backend_pb2 as pb

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
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=LABEL_STYLE)
    facts.add_column()
    for label, content in _facts(inspection, all_memory=all_memory):
        facts.add_row(label, content)
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
    told = SEPARATOR.join(
        f"{process.role} {process.process_id}"
        + (f" {decimal(process.resident_bytes)}" if process.resident_bytes else "")
        for process in report.processes
    )
    if not report.restarts:
        return Text(printable(told))
    losses = f"{report.restarts:,} engines lost, {report.lost_s:,.1f} s in all"
    reasons = "".join(f"\n{restart.reason}" for restart in report.latest_restarts[-1:])
    return Text(printable(f"{told}\n{losses}{reasons}"))


def _memory(memory: pb.MemoryUsageData, *, all_parts: bool) -> Table:
    """Return a bar per part; the parts overlap, and the longest bar is the largest of them."""
    main = {name: memory.breakdown[name] for name in _MAIN_PARTS if name in memory.breakdown}
    shown = main if main and not all_parts else dict(sorted(memory.breakdown.items()))
    bars = Table.grid(padding=(0, 2))
    bars.add_column()
    bars.add_column(justify="right")
    parts = {"total": memory.total, **shown}
    largest = max(parts.values())
    for part, size in parts.items():
        bars.add_row(Text(printable(part)), decimal(size), _bar(size, largest, MEMORY_BAR_WIDTH))
    return bars


def _machine(machine: pb.MachineReport) -> RenderableType:
    """Return each backend's part of the shared memory."""
    rows = Table.grid(padding=(0, 2))
    claimed = sum(backend.held_bytes + backend.budget_bytes for backend in machine.backends)
    for backend in machine.backends:
        rows.add_row(*_shares(backend))
    return Group(f"{decimal(claimed)} of {decimal(machine.usable_bytes)} claimed", rows)


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


def _name(request: pb.RequestReport) -> Text:
    return Text(printable(request.request_id), no_wrap=True, overflow="ellipsis")


def _phase(request: pb.RequestReport) -> Text:
    return Text(printable(request.phase), _PHASE_STYLES.get(request.phase, ""))


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
    _Column("request", _name, "left"),
    _Column("phase", _phase, "left"),
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
