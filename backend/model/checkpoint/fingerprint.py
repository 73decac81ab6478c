"""The identity of a loaded model: anything that changes its KV changes its fingerprint."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.config import ModelOptions
from backend.model.checkpoint.adapters.files import adapter_directory
from common.versions import version_of

_DIGEST_BYTES = 12
# These libraries compute the KV: another version may compute it differently.
_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm")


def fingerprint(options: ModelOptions, directory: Path, types: Sequence[str]) -> str:
    """Return an alphanumeric name for a model, its adapters and the way it is run.

    Weights are identified by name, size and time: reading them all would take too long.

    Args:
        options: Options that it was loaded with.
        directory: Directory of the model.
        types: The data types of its weights in memory, which may not be those of its files.
    """
    adapters = [
        (list(weight_files(adapter_directory(adapter, options.models_dir))), adapter.scale)
        for adapter in options.adapters
    ]
    memory = options.tuning.memory
    identity = {
        "model": list(weight_files(directory)),
        "adapters": adapters,
        "types": list(types),
        "vision": options.tuning.checkpoint.vision,
        "kv": [memory.kv_bits, memory.kv_group_size, options.tuning.prompt_cache.cache_bits],
        "versions": [version_of(name) for name in _PACKAGES],
    }
    text = json.dumps(identity)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def weight_files(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of the files that make up a model."""
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".json", ".safetensors", ".py"):
            status = path.stat()
            yield str(path.relative_to(directory)), status.st_size, status.st_mtime_ns
