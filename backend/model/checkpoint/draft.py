"""The draft model that a load names: a model like any other, found in the same way."""

import re
from dataclasses import replace
from pathlib import Path

from backend.config import ModelOptions, TuningOptions

DRAFTING = frozenset({"auto", "draft", "mtp"})
"""Values of the option `speculation` with which a model that is named drafts."""

_SCHEME = re.compile(r"^(hf|huggingface):/+")


def draft_options(options: ModelOptions) -> ModelOptions | None:
    """Return the options that a draft model is found and loaded with, if one is wanted.

    Args:
        options: Of the model that it drafts for.
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
    """Tell whether several processes are to compute a model: then nothing drafts for it."""
    group = options.tuning.group
    return (group.tensor_parallel_size or 1) > 1 or bool(group.hosts or group.hostfile)


def _wanted(text: str, models_dir: Path | None) -> str:
    """Return what was asked for: hosts put the directory of the models before it, whatever it is.

    That may be a path below it, a hub id or an absolute path.
    """
    path = Path(text)
    if models_dir is None or path.exists() or not path.is_relative_to(models_dir):
        return text
    inner = str(path.relative_to(models_dir))
    absolute = Path("/", inner)
    return str(absolute) if absolute.exists() else _SCHEME.sub(r"\1://", inner)
