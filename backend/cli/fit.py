"""`fit`: the memory of a model on this machine, before a load: a table, JSON, and advice.

MLX and transformers take a second to import: not for --help.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from backend.cli.app import FiniteRange
from backend.cli.render import ERROR_STYLE, LABEL_STYLE, QUIET_STYLE, facts_table, printable
from backend.config import ModelOptions, TuningOptions
from backend.errors import BackendError, DownloadError, ModelNotFoundError
from common.directories import state_directory
from common.openblas import attach, find_openblas, is_wanted

if TYPE_CHECKING:
    from backend.engine.footprint import KvForecast, MemoryForecast

LENGTHS = (2_048, 8_192, 32_768, 131_072)
# A request of common length; the report warns if not even one fits.
COMMON_TOKENS = 8_192
# With fewer at once, a narrower KV cache is worth its loss of precision.
FEWEST_ROWS = 4
_UNIT_TOKENS, _MEGABYTE = 1000, 1e6
# Weights that take so many times their files are computed in another type.
_GROWN = 1.5


def table(forecast: MemoryForecast) -> RenderableType:
    """Return the whole report for a terminal."""
    facts = facts_table((label, printable(text)) for label, text in _facts(forecast))
    parts: list[RenderableType] = [facts, Text()]
    if forecast.has_room and forecast.caches:
        parts += [_requests(forecast), Text()]
    return Group(*parts, *advice(forecast))


def values(forecast: MemoryForecast) -> dict[str, Any]:
    """Return the report as JSON values, sizes in bytes."""
    experts = forecast.experts
    return {
        "model": forecast.card.name,
        "type": forecast.card.model_type,
        "context_length": forecast.card.context_length,
        "weights_bytes": forecast.card.weights_bytes,
        "files_bytes": forecast.files_bytes,
        "vocabulary_bytes": forecast.vocabulary_bytes,
        "programs_bytes": forecast.server_bytes + forecast.engine_bytes,
        "resident_bytes": forecast.resident_bytes,
        "computing_bytes": forecast.free_bytes,
        "draft_model": forecast.draft.name if forecast.draft else "",
        "draft_weights_bytes": forecast.draft.weights_bytes if forecast.draft else 0,
        "media_bytes": forecast.media_bytes,
        "experts": experts and {**asdict(experts), "tokens_per_s": experts.tokens_per_s},
        "memory_bytes": forecast.memory_bytes,
        "kv_budget_bytes": forecast.budget_bytes,
        "fits": forecast.has_room,
        "caches": [
            {
                "kv_bits": cache.bits,
                "bytes_per_token": cache.profile.bytes_per_token,
                "draft_bytes_per_token": _draft_bytes(cache),
                "fixed_bytes": cache.profile.fixed_bytes,
                "windows": [
                    {"tokens": window.size, "bytes_per_token": window.bytes_per_token}
                    for window in cache.profile.windows
                ],
                "requests": {str(n): forecast.rows(cache, n) for n in lengths(forecast)},
            }
            for cache in forecast.caches
        ],
        "options": list(options(forecast)),
    }


def lengths(forecast: MemoryForecast) -> list[int]:
    """Return the lengths to show: common ones below the context, and the context."""
    context = forecast.card.context_length or LENGTHS[-1]
    return [*(length for length in LENGTHS if length < context), context]


def options(forecast: MemoryForecast) -> Iterator[str]:
    """Yield the options worth setting on this machine, as in a model's YAML."""
    if not forecast.caches:
        return
    widest = forecast.caches[0]
    chosen = next(
        (each for each in forecast.caches if _common_rows(forecast, each) >= FEWEST_ROWS),
        max(forecast.caches, key=lambda each: _common_rows(forecast, each)),
    )
    if chosen is not widest:
        yield f"kv_bits:{chosen.bits}"


def advice(forecast: MemoryForecast) -> Iterator[Text]:
    """Yield sentences of advice."""
    if not forecast.has_room:
        needed, there = decimal(forecast.weights_bytes), decimal(forecast.memory_bytes)
        yield Text(f"It does not fit: the weights take {needed} of {there}.", ERROR_STYLE)
        yield Text("Take a smaller model, or one quantised to fewer bits.")
        if forecast.is_mixture:
            yield Text("Or leave its experts on disk: --experts disk says what that takes.")
        return
    if found := list(options(forecast)):
        yield Text("Options worth setting (docs/reference/options.md):", QUIET_STYLE)
        yield from (Text(f"  - {option}") for option in found)
    else:
        yield Text("No option needs to be set.", QUIET_STYLE)
    if forecast.caches and all(_common_rows(forecast, cache) < 1 for cache in forecast.caches):
        most = max(cache.profile.max_tokens(forecast.budget_bytes) for cache in forecast.caches)
        yield Text(f"A request may hold {most:,} tokens at most.", ERROR_STYLE)


def _facts(forecast: MemoryForecast) -> Iterator[tuple[str, str]]:
    card = forecast.card
    context = f"context {card.context_length:,}" if card.context_length else "no context limit"
    yield "model", f"{card.name} ({card.model_type}), {context}"
    yield "weights", _weights(forecast)
    if experts := forecast.experts:
        held, store = decimal(experts.budget_bytes), decimal(experts.store_bytes)
        yield "experts", f"{held} of the weights, of {store} in a store on disk"
        rate, read = decimal(int(experts.disk_bytes_per_s)), decimal(experts.token_bytes)
        speed = f"{experts.tokens_per_s:.3g} tokens/s at best"
        yield "reading", f"up to {read} a token, at {rate}/s: {speed} if none is in memory"
    if draft := forecast.draft:
        unit = decimal(_UNIT_TOKENS * _draft_bytes(forecast.caches[0]))
        size = f"{decimal(draft.weights_bytes)}, and {unit} of KV for 1,000 tokens"
        yield "draft model", f"{draft.name} ({draft.model_type}): {size}"
    yield "vocabulary", f"{decimal(forecast.vocabulary_bytes)} in server and engine"
    server, engine = decimal(forecast.server_bytes), decimal(forecast.engine_bytes)
    yield "programs", f"{server} the server, {engine} the engine"
    yield "together", f"{decimal(forecast.resident_bytes)} held once it is loaded"
    if forecast.media_bytes:
        yield "media", f"{decimal(forecast.media_bytes)} kept for pictures and sounds"
    if not forecast.caches:
        yield "KV", "none: it is an encoder"
    elif forecast.has_room:
        yield "KV", f"up to {decimal(forecast.budget_bytes)} more for requests and prompt cache"
    if forecast.has_room:
        yield "prompts", f"{decimal(forecast.free_bytes)} stay free, to compute with"
    usable = f"{decimal(forecast.working_set_bytes)} of {decimal(forecast.memory_bytes)} usable"
    yield "memory", usable


def _weights(forecast: MemoryForecast) -> str:
    """Return the size of the weights, and of their files if it is much smaller."""
    taken, stored = forecast.card.weights_bytes, forecast.files_bytes
    size = decimal(taken)
    return f"{size}, stored in {decimal(stored)}" if taken > _GROWN * stored > 0 else size


def _requests(forecast: MemoryForecast) -> Table:
    """Return the number of concurrent requests, by length and width of the KV cache."""
    columns = lengths(forecast)
    rows = Table(box=None, pad_edge=False, header_style=LABEL_STYLE)
    rows.add_column("kv_bits")
    rows.add_column("1,000 tokens", justify="right")
    for length in columns:
        rows.add_column(f"× {length:,}", justify="right")
    for cache in forecast.caches:
        counts = (f"{forecast.rows(cache, length):,}" for length in columns)
        rows.add_row(str(cache.bits or "unset"), _unit(cache), *counts)
    return rows


def _unit(cache: KvForecast) -> str:
    """Return the size of a thousand positions, in layers that keep them, and of fixed states.

    It includes a draft model.
    """
    profile = cache.profile
    per_token = profile.bytes_per_token + _draft_bytes(cache)
    kept = (min(window.size, _UNIT_TOKENS) * window.bytes_per_token for window in profile.windows)
    size = decimal(_UNIT_TOKENS * per_token + sum(kept))
    return f"{size} + {decimal(profile.fixed_bytes)}" if profile.fixed_bytes else size


def _draft_bytes(cache: KvForecast) -> int:
    """Return a draft model's bytes per position: it has neither windows nor states."""
    draft = cache.profile.draft
    return draft.bytes_per_token if draft else 0


def _common_rows(forecast: MemoryForecast, cache: KvForecast) -> int:
    return forecast.rows(cache, min(COMMON_TOKENS, forecast.card.context_length or COMMON_TOKENS))


OFFLINE = {"HF_HUB_OFFLINE": "1"}


@click.command("fit")
@click.argument("model")
@click.option(
    "--models-path",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to look up a relative path in first, as the host does.",
)
@click.option("--draft-model", metavar="MODEL", help="Also load this draft model or head.")
@click.option(
    "--experts",
    type=click.Choice(("resident", "disk")),
    default="resident",
    help="Where those of a mixture are.",
)
@click.option(
    "--expert-bytes", type=click.IntRange(1), metavar="BYTES", help="Limit of those in memory."
)
@click.option(
    "--disk-rate",
    type=FiniteRange(0, min_open=True),
    metavar="MB/S",
    help="Of the disk with experts, instead of measuring it.",
)
@click.option("--download", is_flag=True, help="Download a hub model if necessary.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(  # noqa: PLR0913 - a parameter per option
    *,
    model: str,
    models_path: Path | None,
    draft_model: str | None,
    experts: str,
    expert_bytes: int | None,
    disk_rate: float | None,
    download: bool,
    as_json: bool,
) -> None:
    """Estimate the memory of a model, and how many requests fit.

    MODEL is a path, a hub id or demo. Exit code 1 if its weights do not fit into the memory.
    """
    from backend.model.checkpoint.upstream import index_transformers

    index_transformers(state_directory(os.environ))
    from backend.cpu.install import install
    from backend.engine.footprint import forecast

    # As the server on this machine would have it.
    if is_wanted(os.environ) and (library := find_openblas()):
        attach(library)
    install()
    tuning = TuningOptions.of(draft_model=draft_model, experts=experts, expert_bytes=expert_bytes)
    if experts == "resident" and (expert_bytes or disk_rate):
        raise click.UsageError("--expert-bytes and --disk-rate are about --experts disk")
    if draft_model and tuning.checkpoint.keeps_experts_on_disk:
        raise click.UsageError("--draft-model: experts on disk exclude a drafter")
    options = ModelOptions(model=model, models_dir=models_path, tuning=tuning)
    try:
        directory = asyncio.run(_located(options, download=download))
        options = asyncio.run(_with_draft(options, download=download))
        foreseen = forecast(options, directory, disk_rate and disk_rate * _MEGABYTE)
    except BackendError as error:
        raise click.ClickException(printable(str(error))) from None
    if as_json:
        click.echo(json.dumps(values(foreseen)))
    else:
        Console().print(table(foreseen))
    if not foreseen.has_room:
        sys.exit(1)


async def _with_draft(options: ModelOptions, *, download: bool) -> ModelOptions:
    """Return options with the directory of the draft model, if one is requested."""
    from backend.model.checkpoint.config_file import draft_options
    from backend.model.checkpoint.gate import named

    draft = draft_options(options)
    if draft is None:
        return options
    with named("draft_model"):
        directory = await _located(draft, download=download)
    return replace(options, tuning=options.tuning.updated(draft_model=str(directory)))


async def _located(options: ModelOptions, *, download: bool) -> Path:
    from backend.model.checkpoint import hub

    place = await asyncio.to_thread(hub.resolve, options)
    if isinstance(place, Path):
        return place
    environment = None if download else {**os.environ, **OFFLINE}
    try:
        return await hub.download(place.repo_id, environment=environment)
    except (DownloadError, ModelNotFoundError) as error:
        if download:
            raise
        text = f"{place.repo_id} is not on this machine; --download fetches it"
        raise ModelNotFoundError(text) from error
