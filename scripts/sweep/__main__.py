"""Tries every family, or some, through a server, and prints the results."""

import asyncio
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import click
import grpc.aio

from backend.cli.server_process import ServerProcess
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from scripts.sweep.families import Family, all_families
from scripts.sweep.recorded_references import References
from scripts.sweep.table import Row, page, rows_of
from scripts.sweep.text_check import check_text
from scripts.sweep.verdict import Expected, Outcome, Verdict
from scripts.sweep.vision_check import check_vision

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "sweep"
PAGE = ROOT / "docs" / "reference" / "families.md"

# Library and server use the same BLAS: another one rounds differently, and tiny experts of equal
# probability swap. Families with large parts get the fast one, as `run.sh` preloads it.
_NO_HUB = {"HF_HOME": str(WORK / "hub"), "HF_HUB_OFFLINE": "1", "MLX_BACKEND_FINDINGS": "0"}
_PLAIN_BLAS = {**_NO_HUB, "MLX_BACKEND_PRELOAD_BLAS": "0"}
_FAST_BLAS = {**_NO_HUB, "LD_PRELOAD": find_library("openblas") or "", "OPENBLAS_NUM_THREADS": "1"}
_UNSERVED = ("refused", "wrong")
_TIMEOUT_S, _SLOW_TIMEOUT_S = 600.0, 2400.0
_MAX_CHARS = 200
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_ONE_BY_ONE = re.compile(r"this model runs one request at a time: (.*)")
_NO_CACHE = re.compile(r"no prompt cache for this model: (.*)")
_MEDIA = re.compile(r"media that can be read: (.*)")


class Trials:
    """Tries families one by one on one server, which is restarted after a crash."""

    def __init__(self, log: Path, options: Sequence[str]) -> None:
        self._log, self._options = log, options
        self._blas = _PLAIN_BLAS
        self._references = References(self._blas)
        self._server: ServerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._references.close()
        self._stop()

    async def row(self, family: Family) -> Row:
        """Compare the replies of a family's library and the server."""
        row = Row(family.name, family.library, "")
        if family.needs is not None:
            return replace(row, text=f"not tried: {family.needs}")
        self._change_blas(_FAST_BLAS if family.is_slow else _PLAIN_BLAS)
        directory = WORK / "models" / f"{family.library}-{family.name}"
        expected = await asyncio.to_thread(self._references.of, family, directory)
        if isinstance(expected, Verdict):
            return replace(row, text=str(expected))
        server = await self._started()
        start = self._log.stat().st_size
        try:
            async with asyncio.timeout(_SLOW_TIMEOUT_S if family.is_slow else _TIMEOUT_S):
                order = _order(family, directory, self._options)
                row = await _served(row, family, order, server.address, expected)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            self._stop()
            return replace(row, text=str(Verdict(Outcome.WRONG, repr(error)[:_MAX_CHARS])))
        if row.text.startswith(_UNSERVED):
            return row
        said = self._log.read_bytes()[start:].decode(errors="replace")
        return _with_facts(row, family, said)

    async def _started(self) -> ServerProcess:
        if self._server is None:
            environment = {**os.environ, **self._blas}
            self._server = ServerProcess.start(self._log, environment=environment)
        await self._server.wait_until_ready()
        return self._server

    def _change_blas(self, blas: Mapping[str, str]) -> None:
        if blas is not self._blas:
            self._references.close()
            self._stop()
            self._blas, self._references = blas, References(blas)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None


def _order(family: Family, directory: Path, options: Sequence[str]) -> pb.ModelOptions:
    return pb.ModelOptions(
        Model=str(directory),
        LoraAdapters=[str(path) for path in family.adapters(directory)],
        TrustRemoteCode=family.has_code,
        Options=["check_at_load:true", *options],
    )


async def _served(
    row: Row, family: Family, order: pb.ModelOptions, address: str, expected: dict[str, Expected]
) -> Row:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        try:
            await stub.LoadModel(order)
        except grpc.aio.AioRpcError as error:
            told = (error.details() or "").replace(order.Model, "it")
            is_refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
            outcome = Outcome.REFUSED if is_refused else Outcome.WRONG
            return replace(row, text=str(Verdict(outcome, told)))
        return await _judged(row, family, stub, expected)


async def _judged(
    row: Row,
    family: Family,
    stub: backend_pb2_grpc.BackendStub,
    expected: dict[str, Expected],
) -> Row:
    if not family.sees:
        return replace(row, text=str(await check_text(stub, expected)))
    text, images = await check_vision(stub, expected)
    return replace(row, text=str(text), images=str(images))


def _with_facts(row: Row, family: Family, log: str) -> Row:
    alone, uncached, media = (found.search(log) for found in (_ONE_BY_ONE, _NO_CACHE, _MEDIA))
    kinds = media[1].split(", ") if media else []
    row = replace(
        row,
        batched=f"no: {alone[1]}" if alone else "yes",
        prompt_cache=f"no: {uncached[1]}" if uncached else "yes",
    )
    if not family.sees:
        return row
    return replace(
        row,
        audio="yes" if "audio" in kinds else "no",
        video="yes" if "video" in kinds else "no",
    )


def untried(rows: Sequence[Row]) -> list[str]:
    """Return the model types of both libraries that have no row."""
    tried = {row.family for row in rows}
    known: set[str] = set()
    for package in ("mlx_lm.models", "mlx_vlm.models"):
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations is not None:
            (folder,) = spec.submodule_search_locations
            modules = pkgutil.iter_modules([folder])
            known.update(m.name for m in modules if m.ispkg or _is_model(folder, m.name))
    return sorted(known - tried)


def _is_model(folder: str, module: str) -> bool:
    """Tell whether a module contains a model, not shared parts."""
    return "class Model(" in Path(folder, f"{module}.py").read_text(encoding="utf-8")


async def sweep(families: Sequence[Family], options: Sequence[str], *, writes: bool) -> list[Row]:
    """Try families one by one, print each result, and optionally write the page.

    Args:
        options: Of each load, as `key:value`.
        writes: Whether to write the page.
    """
    rows = []
    with Trials(WORK / "server.log", options) as trials:
        for family in families:
            rows.append(await trials.row(family))
            click.echo(" | ".join(asdict(rows[-1]).values()))
            if writes:
                _write(rows[-1:])
    return rows


def _write(rows: Sequence[Row]) -> None:
    """Write rows into the page; those of other families are kept."""
    merged = merge(PAGE.read_text(encoding="utf-8"), rows, all_families())
    PAGE.write_text(page(merged, untried(merged)), encoding="utf-8")


def merge(written: str, rows: Sequence[Row], families: Sequence[Family]) -> list[Row]:
    """Return the rows of families, in order: new ones, or those of a page."""
    found = {(row.family, row.library): row for row in (*rows_of(written), *rows)}
    keys = ((family.name, family.library) for family in families)
    return [found[key] for key in keys if key in found]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Write docs/reference/families.md.")
@click.option("--option", "options", multiple=True, metavar="KEY:VALUE", help="Of each load.")
def main(names: tuple[str, ...], options: tuple[str, ...], *, write: bool) -> None:
    """Try the families NAMES, or all."""
    WORK.mkdir(parents=True, exist_ok=True)
    families = [family for family in all_families() if not names or family.name in names]
    rows = asyncio.run(sweep(families, options, writes=write))
    if any(cell.startswith("wrong") for row in rows for cell in (row.text, row.images)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
