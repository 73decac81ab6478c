"""The key of a model's findings: anything that may change a result changes it."""

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from backend.config import ModelOptions
from backend.engine.rows.admission import device_name
from backend.model.checkpoint.gate import fingerprint, weight_files
from backend.model.checkpoint.weights import weight_types
from backend.model.loaded import RunnableModel
from common.openblas import kernel_name
from common.process import usable_cores
from common.remedies import version_of

# Raise it when trials look at more, or their results mean something else.
_EDITION = 2
_DIGEST_BYTES = 16
# Beside the libraries of the fingerprint: this backend, and those that prepare media.
_PACKAGES = ("mlx-grpc-backend", "transformers", "tokenizers")


def files_digest(directory: Path) -> str:
    """Return a name for the present files of a directory."""
    return _digest(list(weight_files(directory)))


def model_key(options: ModelOptions, model: RunnableModel) -> str:
    """Return the key of a model on this machine.

    Args:
        model: The model in memory; its path is that of its files.
    """
    tuning = options.tuning
    identity = {
        "edition": _EDITION,
        "files": fingerprint(options, Path(model.card.path), weight_types(model.network)),
        "network": type(model.network).__name__,
        "model_type": model.card.model_type,
        "versions": [version_of(name) for name in _PACKAGES],
        "machine": [platform.node(), platform.machine(), usable_cores()],
        "device": [str(mx.default_device()), device_name(), kernel_name()],
        "code": [options.trusts_remote_code, tuning.checkpoint.dequantize],
        "text": [options.tokenizer, asdict(tuning.text)],
        "media": repr(options.media_limits),
        "environment": list(options.environment),
    }
    return _digest(identity)


def _digest(identity: object) -> str:
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
