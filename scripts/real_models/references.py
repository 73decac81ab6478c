"""Has llama.cpp answer the prompts of the tests, and writes `tests/real/references`.

`python -m scripts.real_models.references`, after `make real-models`. llama.cpp comes as a wheel
into an environment of its own, and reads each model from a GGUF file in float32, so that only the
order of its sums differs from ours.
"""

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from scripts.real_models import checkpoint, minilm, recipes
from scripts.real_models.__main__ import TARGET
from scripts.real_models.packages import LLAMA_CPP, llama_cpp_python
from scripts.real_models.prompts import LONG_PROMPTS, PROMPTS, TEXTS
from scripts.real_models.recipes import Recipe
from scripts.real_models.source import Source, read, write

PACKAGES = TARGET / "packages"
REFERENCES = Path(__file__).parents[2] / "tests" / "real" / "references"
_ASKING = Path(__file__).with_name("llama_cpp.py")
# Of each reply: how many tokens, and with how many alternatives.
_TOKENS, _TOP = 16, 5


def _ask(python: Path, source: Source, question: dict[str, Any]) -> dict[str, Any]:
    """Have llama.cpp answer with a model that is in float32."""
    path = TARGET / "reference.gguf"
    write(source, path, PACKAGES)
    answered = subprocess.run(  # noqa: S603
        [str(python), str(_ASKING)],
        input=json.dumps({"model": str(path), **question}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    path.unlink()
    return {"made_by": LLAMA_CPP, **json.loads(answered.stdout)}


def _decoder(python: Path, recipe: Recipe) -> dict[str, Any]:
    source = read(recipe.find(PACKAGES), PACKAGES)
    if "f32" not in recipe.precisions:
        source = checkpoint.rounded(source)
    question = {
        "texts": TEXTS,
        "prompts": {**PROMPTS, **LONG_PROMPTS},
        "tokens": _TOKENS,
        "top": _TOP,
    }
    answers = _ask(python, source, question)
    best = [each for reply in answers["replies"].values() for each in reply["top"]]
    gap = min(first[1] - second[1] for first, second, *_ in best)
    click.echo(f"{recipe.name}: the two best candidates differ by {gap:.4f} at least")
    return answers


def _encoder(python: Path) -> dict[str, Any]:
    folder = TARGET / recipes.ENCODER
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.no_padding()
    ids = [file.encode(text).ids for text in TEXTS[::2]]
    return {"ids": ids, **_ask(python, minilm.as_source(folder), {"embedded": ids})}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Write one file for each model, or for those that are named."""
    python = llama_cpp_python(TARGET)
    REFERENCES.mkdir(exist_ok=True)
    makers = {one.name: partial(_decoder, python, one) for one in recipes.DECODERS}
    makers[recipes.ENCODER] = partial(_encoder, python)
    for name in names or makers:
        text = json.dumps(makers[name](), separators=(",", ":")).replace("},", "},\n")
        (REFERENCES / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        click.echo(f"{name}: written")


if __name__ == "__main__":
    main()
