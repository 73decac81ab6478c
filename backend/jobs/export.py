"""Exports a trained checkpoint as an adapter, or merged into its model."""

import shutil
from pathlib import Path

from mlx.utils import tree_unflatten
from mlx_lm.utils import dequantize_model, load, quantize_model, save

from backend.errors import InvalidRequestError
from backend.jobs.checkpoints import CONFIG, WEIGHTS, base_model, require_checkpoint
from backend.jobs.job import COMPLETED, Export, Progress, Report
from backend.jobs.models import find_model, require_new, written_whole
from backend.model.text.tokenizer_file import keep_files


def export(job: Export, report: Report) -> Progress:
    """Write the checkpoint in the requested form and return the final progress.

    Raises:
        InvalidRequestError: The checkpoint is not valid, or the result cannot be written.
        LoadError: Its model cannot be found or read.
    """
    checkpoint = require_checkpoint("checkpoint_path", job.checkpoint)
    target = job.target
    require_new(job.target_field, target)
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
