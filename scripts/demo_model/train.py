"""Trains the embedded demo model and writes it as a plain Hugging Face directory.

One core suffices: about half an hour with OpenBLAS (LD_PRELOAD=libopenblas.so.0,
OPENBLAS_NUM_THREADS=1); stock BLAS is several times slower.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from batches import DOCUMENT_SHARE, Batch, batches, prompt_text
from conversations import assert_unseen, draw_sample
from demo_tokenizer import END_OF_TEXT, TURN_END, VOCAB_SIZE, train_tokenizer, untrained_tokenizer
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from samples import document
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Loss = Callable[[qwen3.Model, mx.array, mx.array], mx.array]
"""The loss of a model over the tokens and weights of a batch."""

_HERE = Path(__file__).parent
_TEMPLATE = _HERE / "chat_template.jinja"
_OUT = _HERE.parents[1] / "backend" / "demo" / "model"
_SEED = 7
_TOKENIZER_SAMPLES = 4000
_BATCH_TOKENS = 2400
_SHORT_SHARE = 0.2
_WARMUP_STEPS = 50
_MUON_RATE = 0.02
_ADAM_RATE = 3e-3

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
}


def _corpus(rng: Random) -> Iterator[str]:
    """Draw the texts the tokenizer learns from."""
    plain = untrained_tokenizer(_TEMPLATE)
    for _ in range(_TOKENIZER_SAMPLES):
        sample = draw_sample(rng)
        text = prompt_text(plain, sample) + sample.target
        assert_unseen(text)
        yield text
        if rng.random() < DOCUMENT_SHARE:
            yield document(rng)


def _rate(peak: float, steps: int) -> Callable[[mx.array], mx.array]:
    """Make a learning rate that rises for a few steps, then falls along a cosine."""
    rise = optim.linear_schedule(0.0, peak, _WARMUP_STEPS)
    fall = optim.cosine_decay(peak, max(1, steps - _WARMUP_STEPS), peak / 300)
    rate: Callable[[mx.array], mx.array] = optim.join_schedules([rise, fall], [_WARMUP_STEPS])
    return rate


def _optimizer(steps: int) -> optim.Optimizer:
    """Make Muon for the hidden matrices, AdamW for embedding and norms."""
    muon = optim.Muon(_rate(_MUON_RATE, steps), weight_decay=0.0)
    adam = optim.AdamW(_rate(_ADAM_RATE, steps), betas=[0.9, 0.98], weight_decay=0.01)
    return optim.MultiOptimizer([muon, adam], [lambda key, w: w.ndim == 2 and "embed" not in key])


def entropy(model: qwen3.Model, tokens: mx.array, weights: mx.array) -> mx.array:
    """Average the cross entropy of each next token by its weight."""
    found = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    mean: mx.array = (found * weights[:, 1:]).sum() / weights[:, 1:].sum()
    return mean


def _curriculum(tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[Batch]:
    """Yield the batches of all steps: short copying first, then the full mix."""
    rng, short_steps = Random(_SEED), int(steps * _SHORT_SHARE)
    yield from islice(batches(tokenizer, rng, _BATCH_TOKENS, short=True), short_steps)
    yield from islice(batches(tokenizer, rng, _BATCH_TOKENS, short=False), steps - short_steps)


def fit(model: qwen3.Model, stream: Iterable[Batch], steps: int, loss_of: Loss = entropy) -> None:
    """Train `model` in place by `steps` batches, logging a running loss."""
    gradient, optimizer = nn.value_and_grad(model, loss_of), _optimizer(steps)
    start, mean = time.monotonic(), 0.0
    for step, (tokens, weights) in enumerate(islice(stream, steps), start=1):
        loss, gradients = gradient(model, tokens, weights)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        mean += (loss.item() - mean) / min(step, 50)
        if step % 50 == 0 or step == steps:
            logger.info("step %d loss %.4f time_s %.0f", step, mean, time.monotonic() - start)


def save(model: qwen3.Model, tokenizer: PreTrainedTokenizerFast, out: Path, dtype: str) -> None:
    """Write weights, configuration, tokenizer and chat template to `out`."""
    tokenizer.save_pretrained(out)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    config = {**_CONFIG, "torch_dtype": dtype, "eos_token_id": ends[0], "pad_token_id": ends[1]}
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    weights = {k: v.astype(getattr(mx, dtype)) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})


def train(steps: int, out: Path, dtype: str) -> None:
    """Train tokenizer and model from scratch and write them to `out`."""
    mx.set_default_device(mx.cpu)
    mx.random.seed(_SEED)
    tokenizer = train_tokenizer(_corpus(Random(_SEED + 1)), _TEMPLATE)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(_CONFIG))
    mx.eval(model.parameters())
    fit(model, _curriculum(tokenizer, steps), steps)
    save(model, tokenizer, out, dtype)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(options.steps, options.out, options.dtype)


if __name__ == "__main__":
    main()
