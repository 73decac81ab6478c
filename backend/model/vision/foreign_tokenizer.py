"""Families whose checkpoints contain a tokenizer other than the model's."""

from collections.abc import Mapping
from pathlib import Path

from backend.config import ModelOptions
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.failures import UPSTREAM_FAILURES
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.processor_call import HfProcessor
from backend.model.vision.towers import load_processor

# Where mlx-vlm gets the tokenizer of a family, by model type.
_ELSEWHERE: Mapping[str, str] = dict.fromkeys(("moondream1", "moondream2"), "moondream/starmie-v1")
_PROBE = "The quick brown fox, 1234567890 times: naïve? def f(x): return x**2\n"


def require_own_tokenizer(
    options: ModelOptions, directory: Path, model_type: str, tokenizer: Tokenizer
) -> None:
    """Check that a checkpoint's tokenizer is the one that its model was trained with.

    Raises:
        UnsupportedModelError: It is not, or cannot be compared; the message gives a remedy.
    """
    repository = _ELSEWHERE.get(model_type)
    if repository is None:
        return
    try:
        processor = load_processor(options, directory)
    except UPSTREAM_FAILURES:
        processor = None
    if fault := _fault(processor, repository, tokenizer):
        raise UnsupportedModelError(
            f"{directory} is of the model type {model_type!r}, whose tokenizer is {repository}: "
            f"{fault}"
        )


def _fault(processor: HfProcessor | None, repository: str, tokenizer: Tokenizer) -> str | None:
    theirs = getattr(processor, "tokenizer", None)
    if theirs is None:
        return (
            "it cannot be had, to compare that of the checkpoint with it: allow the download, or "
            "put it into the cache of Hugging Face"
        )
    ours = tokenizer.encode(_PROBE, adds_special=False)
    if theirs.encode(_PROBE, add_special_tokens=False) == ours:
        return None
    return f"put the tokenizer files of {repository} in the place of the checkpoint's, another one"
