"""`pull` and `list`: models of the hub on this machine."""

import asyncio
import json
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from backend import demo
from backend.cli.hub_models import CachedModel, DamagedError, cached_models
from backend.cli.hub_models import pull as pulled
from backend.cli.render import LABEL_STYLE, printable
from backend.config import ModelOptions
from backend.errors import BackendError
from backend.model.checkpoint.hub import HubModel, resolve


@click.command("pull")
@click.argument("model", metavar="ORG/NAME")
def pull(model: str) -> None:
    """Download a model of the hub and check its files.

    A download that was stopped goes on where it was. Private models need HF_TOKEN.
    """
    console = Console()
    try:
        place = resolve(ModelOptions(model=model))
        if isinstance(place, HubModel):
            place = asyncio.run(pulled(console, place.repo_id))
    except (BackendError, DamagedError) as error:
        raise click.ClickException(printable(str(error))) from None
    except KeyboardInterrupt:
        raise click.ClickException("stopped; the same command goes on") from None
    click.echo(f"{model} is in {place}")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per model.")
def list_models(*, as_json: bool) -> None:
    """List the models on this machine, with the embedded one."""
    models = [_embedded(), *cached_models()]
    if as_json:
        for model in models:
            click.echo(json.dumps({"name": model.name, "bytes": model.size}))
        return
    table = Table(box=None, pad_edge=False, header_style=LABEL_STYLE)
    table.add_column("model")
    table.add_column("size", justify="right")
    table.add_column("last used")
    for model in models:
        used = f"{datetime.fromtimestamp(model.used_at).astimezone():%Y-%m-%d}"
        table.add_row(printable(model.name), decimal(model.size), used)
    Console().print(table)


def _embedded() -> CachedModel:
    files = [path.stat() for path in Path(demo.MODEL_DIR).iterdir() if path.is_file()]
    size, used_at = sum(file.st_size for file in files), max(file.st_atime for file in files)
    return CachedModel(demo.NAME, size, used_at)
