"""Translates errors raised by libraries during a load into messages for users."""

import re
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from backend.errors import LoadError, LoadFailedError, OutOfMemoryError, UnsupportedModelError
from backend.model.checkpoint.config_file import CONFIG_NAME, explain, read_json

# Loading runs model code of any origin; `olmo` exits the process if a package is missing.
UPSTREAM_FAILURES: tuple[type[BaseException], ...] = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError),
    *(NameError, OSError, RuntimeError, StopIteration, SyntaxError, TypeError, ValueError),
    *(BufferError, EOFError, SystemExit, StrictDataclassError),
)

_MAX_CHARS = 400
_OUT_OF_MEMORY = re.compile(
    r"\bmalloc\b|out of memory|insufficient memory|bad_alloc", re.IGNORECASE
)
_UNKNOWN_TYPE = re.compile(r"Model type (\S+) not supported")
_MISFIT = re.compile(
    r"parameters not in model|Missing \d+ parameters|Expected shape|"
    r"\[quantize\]|Cannot infer the quantization"
)
_REMOTE_CODE = "trust_remote_code"
_NO_METAL = "No Metal back-end"


def as_load_error(failure: BaseException, directory: Path) -> LoadError:
    """Return the error to report for a failed load."""
    text = one_line(failure)
    if isinstance(failure, MemoryError) or _OUT_OF_MEMORY.search(text):
        return OutOfMemoryError(f"{directory} does not fit into memory: {text}")
    if _MISFIT.search(text):
        return LoadError(f"the weights in {directory} do not match its config.json: {text}")
    if reason := _unsupported(failure, text):
        return UnsupportedModelError(f"{directory} {reason}")
    if reason := _explained(failure, directory):
        return LoadError(reason)
    return LoadFailedError(f"{directory} could not be loaded: {type(failure).__name__}: {text}")


def _unsupported(failure: BaseException, text: str) -> str | None:
    if match := _UNKNOWN_TYPE.search(text):
        return f"is of the model type {match[1]!r}, which mlx-lm does not support"
    if _REMOTE_CODE in text:
        return "has its own Python code: set trust_remote_code to run it"
    if _NO_METAL in text:
        return "computes with kernels for Apple GPUs only: it cannot run on this machine"
    if isinstance(failure, SystemExit):
        return "needs a package that is not installed"
    if isinstance(failure, ImportError):
        return f"needs something that is not installed: {text}"
    return None


def _explained(failure: BaseException, directory: Path) -> str | None:
    path = directory / CONFIG_NAME
    try:
        config = read_json(path, dict)
    except LoadError:
        return None
    return explain(failure, path, config)


def one_line(failure: BaseException) -> str:
    """Return the message of a failure as one line of limited length."""
    text = " ".join(str(failure).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
