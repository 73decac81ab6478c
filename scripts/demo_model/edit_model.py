"""Trains a model that rewrites code of its prompt, and a draft model for it; both are widened.

The demo model additionally learns to rename an identifier. A model of its first layers is
distilled from it. Each is then written as a corner of a larger one, with the same output and the
cost of its size (`widening.py`). It takes about ten minutes of processor time.
"""

import argparse
import json
import logging
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from batches import Batch, Row, batches_of, prompt_text, sample_row
from conversations import draw_sample
from edits import draw_edit
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from mlx_lm.models import qwen3
from names import mentions_held_out
from samples import Sample, user
from train import Loss, fit
from transformers import PreTrainedTokenizerFast
from widening import widened

logger = logging.getLogger(__name__)

_DEMO = Path(__file__).parents[2] / "backend" / "demo" / "model"
_SEED = 11
_BATCH_TOKENS = 2400
_SHORT_LINES, _MOST_LINES = 3, 10
_SHORT_SHARE = 0.3
# Steps after these, in which it learns to rename a few identifiers correctly.
_KNOWN_STEPS = 0.3
# Share of the demo model's conversations, so that it does not forget them.
_KNOWN_SHARE = 0.2
# Without the last layer it is right in four of five places before training.
_DRAFT_LAYERS = 3
# Final width and layers: 60M, and 6M for the draft model.
_SIZE, _DRAFT_SIZE = (640, 12), (384, 3)
_TRIED_EDITS = 10


def _edit(rng: Random, lines: int, *, is_known: bool) -> Sample:
    drawn = draw_edit(rng, lines, is_known=is_known)
    while mentions_held_out(drawn.question):
        drawn = draw_edit(rng, lines, is_known=is_known)
    messages = [user(drawn.question)]
    return Sample("edit", messages, "", drawn.answer, thinking=False)


def _stream(
    tokenizer: PreTrainedTokenizerFast, rng: Random, most_lines: int, *, is_known: bool
) -> Iterator[Batch]:
    def draw() -> Row:
        if rng.random() < _KNOWN_SHARE:
            return sample_row(tokenizer, draw_sample(rng))
        return sample_row(tokenizer, _edit(rng, rng.randint(1, most_lines), is_known=is_known))

    return batches_of(draw, rng, _BATCH_TOKENS)


def _curriculum(
    tokenizer: PreTrainedTokenizerFast, rng: Random, short_steps: int
) -> Iterator[Batch]:
    """Yield batches of edits of any identifier forever, short ones first, to teach copying."""
    yield from islice(_stream(tokenizer, rng, _SHORT_LINES, is_known=False), short_steps)
    yield from _stream(tokenizer, rng, _MOST_LINES, is_known=False)


def _beginning(teacher: qwen3.Model, config: dict[str, Any]) -> qwen3.Model:
    """Return a model of the first layers of its teacher."""
    student = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    names = {name for name, _ in tree_flatten(student.parameters())}
    kept = [(name, w) for name, w in tree_flatten(teacher.parameters()) if name in names]
    student.load_weights(kept)
    return student


def _loss_by(teacher: qwen3.Model) -> Loss:
    """Return the loss of a model's predictions against the teacher's."""

    def loss(model: qwen3.Model, tokens: mx.array, weights: mx.array) -> mx.array:
        wanted = mx.softmax(teacher(tokens[:, :-1]), axis=-1)
        found = nn.losses.cross_entropy(model(tokens[:, :-1]), wanted)
        mean: mx.array = (found * weights[:, 1:]).sum() / weights[:, 1:].sum()
        return mean

    return loss


def _write(model: qwen3.Model, config: dict[str, Any], size: tuple[int, int], out: Path) -> None:
    """Write a model at its large size, with the demo model's tokenizer."""
    own = {name: weight.astype(mx.float32) for name, weight in tree_flatten(model.parameters())}
    wide, weights = widened(config, own, hidden=size[0], layers=size[1])
    out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(_DEMO / name, out)
    shutil.copy(_DEMO / "generation_config.json", out)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    wide["torch_dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(wide, indent=2), encoding="utf-8")


def _try(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Log how many unseen edits a model writes correctly."""
    model, wrapped = load(str(directory))[:2]
    rng, right = Random(_SEED + 1), 0
    for _ in range(_TRIED_EDITS):
        sample = _edit(rng, _MOST_LINES, is_known=True)
        prompt = tokenizer.encode(prompt_text(tokenizer, sample))
        replies = stream_generate(model, wrapped, prompt, max_tokens=400)
        right += "".join(reply.text for reply in replies) == sample.target
    logger.info("%s: %d of %d edits without a fault", directory.name, right, _TRIED_EDITS)


def make(steps: int, draft_steps: int, out: Path) -> None:
    """Train both and write them to `out` and `out/draft`."""
    mx.set_default_device(mx.cpu)
    mx.random.seed(_SEED)
    rng = Random(_SEED)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(_DEMO))
    model, config = _demo_model()
    fit(model, _curriculum(tokenizer, rng, int(_SHORT_SHARE * steps)), steps)
    edits = _stream(tokenizer, rng, _MOST_LINES, is_known=True)
    fit(model, edits, int(_KNOWN_STEPS * steps))
    draft_config = config | {"num_hidden_layers": _DRAFT_LAYERS}
    student = _beginning(model, draft_config)
    fit(student, edits, draft_steps, _loss_by(model))
    part = out.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    _write(model, config, _SIZE, part)
    _write(student, draft_config, _DRAFT_SIZE, part / "draft")
    for directory in (part, part / "draft"):
        _try(directory, tokenizer)
    part.rename(out)


def _demo_model() -> tuple[qwen3.Model, dict[str, Any]]:
    model = load(str(_DEMO))[0]
    model.set_dtype(mx.float32)
    return model, json.loads((_DEMO / "config.json").read_text(encoding="utf-8"))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--draft-steps", type=int, default=120)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(options.steps, options.draft_steps, options.out)


if __name__ == "__main__":
    main()
