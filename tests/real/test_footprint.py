"""The memory of server and engine with published models, against the answers of `fit`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_answers import FINDINGS
from real_process import real_backend

from backend.pb import backend_pb2 as pb

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(not Path("/proc").exists(), reason="reads Linux's own books"),
]

# Trials begin some seconds after a load; then free memory is given back.
INTERVAL_S = 5.0
TIMEOUT_S = 600.0


def load(backend, directory):
    is_encoder = directory.name == "minilm"
    request = pb.ModelOptions(Model=str(directory), Embeddings=is_encoder)
    assert backend.stub.LoadModel(request, timeout=TIMEOUT_S).success
    if is_encoder:
        backend.stub.Embedding(pb.PredictOptions(Embeddings="one"), timeout=TIMEOUT_S)
    else:
        backend.stub.Predict(pb.PredictOptions(Prompt="one", Tokens=2), timeout=TIMEOUT_S)


def held(backend):
    report = backend.inspector.Inspect(pb.InspectRequest(), timeout=TIMEOUT_S)
    return {process.role: process.resident_bytes for process in report.processes}


def settled(backend):
    """Return the memory of the processes once it has stayed the same for a while."""
    sizes = [{}]
    while len(sizes) < 4 or sizes[-1] != pytest.approx(sizes[-2], rel=0.01):
        assert len(sizes) < 20
        time.sleep(INTERVAL_S)
        sizes.append(held(backend))
    return sizes[-1]


@pytest.fixture
def backend(tmp_path):
    environment = os.environ | {"MLX_BACKEND_FINDINGS": str(FINDINGS)}
    with real_backend(tmp_path / "log", environment) as running:
        yield running


@pytest.mark.parametrize("name", ["smollm2-bf16", "smollm2-4bit", "gemma3-bf16", "minilm"])
def test_fit_says_what_is_held_within_a_tenth(name, real_models, backend):
    directory = real_models(name)
    load(backend, directory)
    command = [sys.executable, "-m", "backend.cli", "fit", str(directory), "--json"]
    told = json.loads(subprocess.check_output(command))
    assert told["resident_bytes"] == pytest.approx(sum(settled(backend).values()), rel=0.1)


def test_a_server_does_not_grow_with_the_number_of_loads(real_models, backend):
    small, large = real_models("smollm2-bf16"), real_models("gemma3-bf16")
    sizes = []
    for _ in range(4):
        load(backend, large)
        load(backend, small)
        sizes.append(settled(backend)["server"])
    assert sizes[-1] < 1.15 * sizes[0]
    assert max(sizes) < 200e6
