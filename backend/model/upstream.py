"""The one door to mlx-lm: whoever needs it in a process, imports it here first."""

import importlib
import resource
from types import ModuleType
from typing import Any, TypeAlias

# Upstream is untyped: an MLX module, and a tokenizer of transformers.
Network: TypeAlias = Any
HfTokenizer: TypeAlias = Any


def import_mlx_lm() -> ModuleType:
    """Import `mlx_lm.utils` and keep the process's limit of open files.

    Importing mlx-lm 0.32 lowers RLIMIT_NOFILE to 2048 of 4096, which a server cannot raise again.
    """
    set_limit = resource.setrlimit
    resource.setrlimit = _keep_limit
    try:
        return importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = set_limit


def _keep_limit(kind: int, limits: tuple[int, int], /) -> None:
    """Stand in for `resource.setrlimit` and change nothing."""
