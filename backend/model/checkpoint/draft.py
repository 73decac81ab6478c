"""The draft model of a load: an ordinary model, located in the same way."""

import re
from dataclasses import replace
from pathlib import Path

from backend.config import ModelOptions, TuningOptions

DRAFTING = frozenset({"auto", "draft", "mtp"})
"""Values of the option `speculation` that enable a named draft model."""

_SCHEME = re.compile(r"^(hf|huggingface):/+")


def draft_options(options: ModelOptions) -> ModelOptions | None:
    """Return the options to load the draft model with, or `None` without one.

    Args:
        options: Options of the model that it drafts for.
    """
    speculation = options.tuning.speculation
    if not speculation.draft_model or speculation.speculation not in DRAFTING:
        return None
    if asks_for_several(options):
        return None
    checkpoint = options.tuning.checkpoint
    return ModelOptions(
        model=_wanted(speculation.draft_model, options.models_dir),
        models_dir=options.models_dir,
        trust_remote_code=options.trust_remote_code,
        dtype=options.dtype,
        tuning=TuningOptions(checkpoint=replace(checkpoint, vision=False)),
    )


def asks_for_several(options: ModelOptions) -> bool:
    """Tell whether a model is to be divided among processes, which rules out a draft model."""
    group = options.tuning.group
    return (group.tensor_parallel_size or 1) > 1 or bool(group.hosts or group.hostfile)


def _wanted(text: str, models_dir: Path | None) -> str:
    """Return the requested name; hosts always put the models directory before it.

    The name may be a path below that directory, a hub id or an absolute path.
    """
    path = Path(text)
    if models_dir is None or path.exists() or not path.is_relative_to(models_dir):
        return text
    inner = str(path.relative_to(models_dir))
    absolute = Path("/", inner)
    return str(absolute) if absolute.exists() else _SCHEME.sub(r"\1://", inner)
