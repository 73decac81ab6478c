"""Has llama.cpp answer the prompts of the tests, and writes `tests/real/references`.

`python -m scripts.real_models.references`, after `make real-models`. llama.cpp comes as a wheel
into an environment of its own, and reads each model from a GGUF file in float32, so that only the
order of its sums differs from ours.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from scripts.real_models import checkpoint, recipes
from scripts.real_models.__main__ import TARGET
from scripts.real_models.prompts import LONG, PROMPTS, TEXTS
from scripts.real_models.recipes import Recipe
from scripts.real_models.source import Source, read

REFERENCES = Path(__file__).parents[2] / "tests" / "real" / "references"
_LLAMA_CPP = "xllamacpp==2026.10.11549"
_ASKING = Path(__file__).with_name("llama_cpp.py")
# Of each reply: how many tokens, and with how many alternatives.
_TOKENS, _TOP = 16, 5


def _environment(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)  # noqa: S603
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, _LLAMA_CPP], check=True)  # noqa: S603
    return python


def _in_float32(source: Source, original: Path, path: Path) -> None:
    """Write the metadata of a GGUF file with the given tensors."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    fields = dict(GGUFReader(original).fields)
    writer = GGUFWriter(path, fields.pop("general.architecture").contents())
    fields.pop("general.file_type", None)
    for name, field in fields.items():
        if not name.startswith("GGUF."):
            kind, *parts = field.types
            part = parts[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, part)
    for name, tensor in source.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ask(python: Path, recipe: Recipe) -> dict[str, Any]:
    original = recipe.find(TARGET / "packages")
    source = read(original, TARGET / "packages")
    if "f32" not in recipe.precisions:
        source = checkpoint.rounded(source)
    path = TARGET / f"{recipe.name}.gguf"
    _in_float32(source, original, path)
    question = {
        "model": str(path),
        "texts": TEXTS,
        "prompts": {**PROMPTS, "long": LONG},
        "tokens": _TOKENS,
        "top": _TOP,
    }
    answered = subprocess.run(  # noqa: S603
        [str(python), str(_ASKING)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
    )
    path.unlink()
    return {"made_by": _LLAMA_CPP, **json.loads(answered.stdout)}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Write one file for each decoder, or for those that are named."""
    python = _environment(TARGET / "llama-cpp")
    REFERENCES.mkdir(exist_ok=True)
    for recipe in recipes.DECODERS:
        if names and recipe.name not in names:
            continue
        answers = _ask(python, recipe)
        text = json.dumps(answers, separators=(",", ":")).replace('},"', '},\n"')
        (REFERENCES / f"{recipe.name}.json").write_text(text + "\n", encoding="utf-8")
        replies = answers["replies"].values()
        gaps = [best[0][1] - best[1][1] for reply in replies for best in reply["top"]]
        click.echo(f"{recipe.name}: the closest two candidates differ by {min(gaps):.4f}")


if __name__ == "__main__":
    main()
