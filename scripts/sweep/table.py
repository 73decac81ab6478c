"""What the sweep found, as the page docs/reference/families.md."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from scripts.sweep.variants import VARIANTS

HEADER = """# Families

Written by `make sweep`: edits are lost. Every family is tried as a tiny model with random weights,
on a CPU, over the socket, and compared token by token with its library by itself: alone, from the
prompt cache, on a second turn, after a cancelled request, and in a batch. *Equal* is the same
tokens. A *tie* is a first difference at two tokens that the library itself rates alike, with the
gap between their log-probabilities, or any difference in a family whose library replies otherwise
when it cuts a prompt. Sounds and videos are compared at load: a yes there means that the trial of
[vision](../guides/vision.md) has passed. The format of tool calls follows from a checkpoint's chat
template, and not from its family: see [output formats](output-formats.md).

"""
_FURTHER = (
    "Model types that a library knows and the sweep has not tried; among them are other names of "
    "the above, parts of other models, and models that generate no text, which are refused at load."
)
_VARIANTS = """## Quantised and adapted

The same for models that mlx-lm has quantised, and for adapters in its format with random weights.
*mixed* has layers of 4 and 8 bits, and of none. Of several adapters all but the last are fused into
the weights, there as here.

"""
_BAR = re.compile(r" (?<!\\)\| ")
_COLUMNS = ("family", "library", "text", "pictures", "sounds", "videos", "batched", "prompt cache")


@dataclass(frozen=True, slots=True)
class Row:
    """A family's line; the fields have the names of the columns."""

    family: str
    library: str
    text: str
    pictures: str = ""
    sounds: str = ""
    videos: str = ""
    batched: str = ""
    prompt_cache: str = ""


def page(rows: Sequence[Row], further: Sequence[str]) -> str:
    """Return the page.

    Args:
        rows: Of the families that were tried.
        further: Names of model types that the libraries know besides, and that were not tried.
    """
    families = [row for row in rows if row.family not in VARIANTS]
    variants = [row for row in rows if row.family in VARIANTS]
    libraries = f"mlx-lm {version('mlx-lm')} and mlx-vlm {version('mlx-vlm')}"
    parts = [HEADER + _part(f"families with {libraries}", families)]
    if variants:
        parts.append(_VARIANTS + _part("models", variants))
    if further:
        parts += [_FURTHER, ", ".join(f"`{name}`" for name in further) + "."]
    return "\n\n".join(parts) + "\n"


def _part(name: str, rows: Sequence[Row]) -> str:
    """Return a table, and what is to be said above it."""
    counts = Counter(row.text.partition(":")[0] for row in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    lines = [_line(list(asdict(row).values())) for row in rows]
    return "\n".join([f"{len(rows)} {name}; text: {told}.", "", *_head(), *lines])


def rows_of(text: str) -> list[Row]:
    """Return the rows of a page; the reverse of `page`."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [Row(*_cells(line)) for line in lines if line not in _head()]


def _head() -> list[str]:
    return [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]


def _cells(line: str) -> list[str]:
    cells = _BAR.split(line.removeprefix("| ").removesuffix(" |"))
    return [cell.replace("\\|", "|") for cell in cells]


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
