"""A model on storage that does not answer holds up its own load, and nothing else."""

import fcntl
import os
import shutil
import signal
import sys
import threading
from contextlib import contextmanager

import grpc
import pytest
from real_process import TIMEOUT_S, real_backend

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

WEIGHTS = "model.safetensors"
# The server reads it too.
SHARED = "tokenizer.json"
DEADLINE_S = 2.0
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases of files")


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    with real_backend(tmp_path_factory.mktemp("storage") / "log") as backend:
        yield backend


@pytest.fixture
def model(tiny_models, tmp_path):
    return shutil.copytree(tiny_models("llama"), tmp_path / "model")


@contextmanager
def unanswered(path):
    """Keep everybody who opens a file waiting; yields an event: somebody does."""
    is_asked = threading.Event()
    before = signal.signal(signal.SIGIO, lambda *_: is_asked.set())
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield is_asked
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


def begin_load(backend, directory, timeout_s=None):
    return backend.stub.LoadModel.future(pb.ModelOptions(Model=str(directory)), timeout=timeout_s)


def require_service(backend, directory):
    assert backend.stub.Health(pb.HealthMessage(), timeout=TIMEOUT_S).message == b"OK"
    backend.load(directory)
    request = pb.PredictOptions(Prompt="ba be", Tokens=3, IgnoreEOS=True)
    assert backend.stub.Predict(request, timeout=TIMEOUT_S).tokens == 3


@on_linux
@pytest.mark.parametrize("name", [WEIGHTS, SHARED])
def test_free_ends_a_load_that_waits_for_storage(backend, tiny_models, model, name):
    with unanswered(model / name) as is_asked:
        load = begin_load(backend, model)
        assert is_asked.wait(TIMEOUT_S)
        assert backend.stub.Health(pb.HealthMessage(), timeout=TIMEOUT_S).message == b"OK"
        assert backend.stub.Free(pb.HealthMessage(), timeout=TIMEOUT_S).success
        error = load.exception(TIMEOUT_S)
        assert error.code() is grpc.StatusCode.CANCELLED
        assert error.details() == "the load was ended by Free or by shutdown"
        require_service(backend, tiny_models("llama"))


@on_linux
def test_a_load_that_waits_for_storage_ends_by_its_deadline(backend, tiny_models, model):
    with unanswered(model / SHARED):
        error = begin_load(backend, model, DEADLINE_S).exception()
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        require_service(backend, tiny_models("llama"))


@on_linux
def test_a_process_ends_in_good_order_while_a_load_waits_for_storage(model, tmp_path):
    with unanswered(model / SHARED) as is_asked, real_backend(tmp_path / "log") as backend:
        load = begin_load(backend, model)
        assert is_asked.wait(TIMEOUT_S)
        assert backend.process.stop() == 0
        assert load.exception(TIMEOUT_S).code() is grpc.StatusCode.CANCELLED


def test_a_pipe_in_the_place_of_the_weights_is_refused_by_name(backend, model):
    (model / WEIGHTS).unlink()
    os.mkfifo(model / WEIGHTS)
    error = begin_load(backend, model, TIMEOUT_S).exception()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"Model: {model / WEIGHTS} is not a regular file"
