"""Quantises a model with mlx-lm, and compares perplexity before and after."""

import json
import logging
import math
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.convert import convert
from mlx_lm.utils import dequantize_model, load, quantize_model, save

from backend.errors import InvalidRequestError, UnsupportedError
from backend.jobs.job import COMPLETED, Export, Progress, Quantization, Report
from backend.jobs.scratch import (
    CONFIG,
    WEIGHTS,
    base_model,
    find_model,
    require_apart,
    require_checkpoint,
    require_new,
    was_cut_off,
    written_whole,
)
from backend.model.checkpoint.weights import files_bytes
from backend.model.device import DEVICE
from backend.model.text.tokenizer_file import follow_wrapped, keep_files

_DEFAULT_GROUP_SIZE = 64
_SAMPLE = Path(__file__).parent / "sample.txt"

log = logging.getLogger(__name__)


def quantize(job: Quantization, report: Report) -> Progress:
    """Write the quantised model and return the final progress.

    Raises:
        UnsupportedError: The model, or none of its layers, can be quantised with these settings.
    """
    target = job.target
    require_new(job.target_field, target)
    begins_anew = was_cut_off(target)
    if begins_anew:
        log.warning("an earlier job that wrote to %s was cut off", target)
    report(Progress(status="downloading", message=job.model))
    source = find_model(job.model, job)
    require_apart(job.target_field, target, source)
    metrics: dict[str, float] = {}
    with written_whole(job.target_field, target) as partial:
        report(Progress(status="quantizing", message=_recipe(job), percent=10.0))
        try:
            convert(
                str(source),
                mlx_path=str(partial),
                quantize=True,
                q_bits=job.bits,
                q_group_size=job.group_size or (_DEFAULT_GROUP_SIZE if job.recipe else None),
                q_mode=job.mode,
                quant_predicate=job.recipe or None,
            )
        except ValueError as error:
            raise UnsupportedError(f"model: cannot be quantised: {error}") from error
        keep_files(source, partial)
        _require_quantised(partial)
        metrics["bytes_source"] = files_bytes(source)
        metrics["bytes_result"] = files_bytes(partial)
        if job.is_checked:
            report(Progress(status="quantizing", message="comparing perplexities", percent=80.0))
            metrics["perplexity_source"] = _perplexity(source)
            metrics["perplexity_result"] = _perplexity(partial)
    share = metrics["bytes_result"] / metrics["bytes_source"]
    message = f"{target.name}: {share:.0%} of the source's bytes"
    if job.is_checked:
        before, after = metrics["perplexity_source"], metrics["perplexity_result"]
        message += f", perplexity {after:.4g} instead of {before:.4g}"
    if begins_anew:
        message += "; an earlier job for it was cut off, and this one started over"
    return Progress(
        status=COMPLETED, message=message, percent=100.0, path=str(target), metrics=metrics
    )


def _recipe(job: Quantization) -> str:
    if job.recipe:
        return job.recipe
    return job.mode if job.bits is None else f"{job.mode}, {job.bits} bits"


def _require_quantised(directory: Path) -> None:
    """Refuse a result without quantised layers: no weight divides into groups."""
    weights = mx.load(str(next(directory.glob("*.safetensors"))))
    if not any(name.endswith(".scales") for name in weights):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        size = config.get("quantization", {}).get("group_size")
        field = 'extra_options["group_size"]'
        raise UnsupportedError(f"{field}: no layer divides into groups of {size} weights")


def _perplexity(directory: Path) -> float:
    """Return the perplexity of the sample text, or of its first 1,024 tokens."""
    model, tokenizer = load(str(directory), lazy=True)
    follow_wrapped(tokenizer, directory)
    # So many tokens at once take their time in 16 bits, however few weights there are.
    DEVICE.prepare(model, keeps_type=False, least_bytes=0)
    ids = mx.array([tokenizer.encode(_SAMPLE.read_text(encoding="utf-8"))[:1024]])
    logits = model(ids[:, :-1]).astype(mx.float32)
    loss = nn.losses.cross_entropy(logits, ids[:, 1:], reduction="mean").item()
    return math.exp(min(loss, 700.0))


def export(job: Export, report: Report) -> Progress:
    """Write the checkpoint in the requested form and return the final progress."""
    checkpoint = require_checkpoint("checkpoint_path", job.checkpoint)
    target = job.target
    require_new(job.target_field, target)
    require_apart(job.target_field, target, checkpoint.path)
    with written_whole(job.target_field, target) as partial:
        if job.form == "lora":
            partial.mkdir()
            for name in (WEIGHTS, CONFIG):
                shutil.copy(checkpoint.path / name, partial)
        else:
            report(Progress(status="saving", message="merging"))
            _merge(job, checkpoint.path, job.model or base_model(checkpoint), partial)
    return Progress(status=COMPLETED, message=str(target), percent=100.0, path=str(target))


def _merge(job: Export, adapter: Path, name: str, partial: Path) -> None:
    if not name:
        raise InvalidRequestError("model", "is empty, and the checkpoint names none")
    source = find_model(name, job)
    require_apart(job.target_field, job.target, source)
    model, tokenizer, config = load(str(source), adapter_path=str(adapter), return_config=True)
    layers = [
        (path, layer.fuse()) for path, layer in model.named_modules() if hasattr(layer, "fuse")
    ]
    if layers:
        model.update_modules(tree_unflatten(layers))
    is_quantised = "quantization" in config
    if is_quantised and job.form == "merged_16bit":
        model = dequantize_model(model)
        config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    if job.form == "merged_4bit" and not is_quantised:
        model, config = quantize_model(model, config, None, 4)
    save(partial, str(source), model, tokenizer, config)
    keep_files(source, partial)
