"""`fit`: a model's memory on this machine."""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from backend.cli.render import printable
from backend.config import ModelOptions, TuningOptions
from backend.errors import BackendError, DownloadError, LoadError, ModelNotFoundError
from common.openblas import attach, find_openblas, is_wanted

OFFLINE = {"HF_HUB_OFFLINE": "1"}


@click.command("fit")
@click.argument("model")
@click.option(
    "--models-path",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to look up a relative path in first, as the host does.",
)
@click.option("--draft-model", metavar="MODEL", help="Also load this draft model or head.")
@click.option("--download", is_flag=True, help="Download a hub model if necessary.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    model: str,
    models_path: Path | None,
    draft_model: str | None,
    download: bool,
    as_json: bool,
) -> None:
    """Estimate the memory of a model, and how many requests fit.

    MODEL is a path, a hub id or demo. Exit code 1 if its weights do not fit into the memory.
    """
    # MLX and transformers take a second to import: not for --help.
    from backend.cli.fit.report import table, values
    from backend.cpu.install import install
    from backend.engine.footprint import forecast

    # As the server on this machine would have it.
    if is_wanted(os.environ) and (library := find_openblas()):
        attach(library)
    install()
    tuning = TuningOptions.of(draft_model=draft_model)
    options = ModelOptions(model=model, models_dir=models_path, tuning=tuning)
    try:
        directory = asyncio.run(_located(options, download=download))
        options = asyncio.run(_with_draft(options, download=download))
        foreseen = forecast(options, directory)
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

    draft = draft_options(options)
    if draft is None:
        return options
    try:
        directory = await _located(draft, download=download)
    except LoadError as error:
        raise type(error)(f"draft_model: {error}") from error
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
