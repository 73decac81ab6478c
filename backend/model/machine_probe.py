"""`python -m backend.model.machine_probe`: report MLX's device and speed as one JSON object.

Runs in its own process, so that a crashing MLX takes nothing else down.
"""

import json
import sys
import time
from typing import Any

import mlx.core as mx

from common.machine_memory import machine_bytes

_SIZE = 1024
_ROUNDS = 3
# A slow machine is told as well by fewer rounds.
_ENOUGH_S = 0.5


def main() -> int:
    """Print the findings."""
    sys.stdout.write(json.dumps(findings()) + "\n")
    return 0


def findings() -> dict[str, Any]:
    """Return the device, its memory in bytes, and its speed in GFLOP/s of float32."""
    info = mx.device_info()
    return {
        "device": mx.default_device().type.name,
        "name": str(info.get("device_name", "")),
        "memory": int(info.get("memory_size") or info.get("total_memory") or machine_bytes()),
        "working_set": int(info.get("max_recommended_working_set_size") or 0),
        "gflops": _gflops(),
    }


def _gflops() -> float:
    """Return the best of a few square matrix products, after one warm-up."""
    matrix = mx.random.normal((_SIZE, _SIZE))
    taken = [_seconds(matrix)]
    while len(taken) <= _ROUNDS and sum(taken) < _ENOUGH_S:
        taken.append(_seconds(matrix))
    return float(2 * _SIZE**3 / min(taken) / 1e9)


def _seconds(matrix: mx.array) -> float:
    started = time.perf_counter()
    mx.eval(matrix @ matrix)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
