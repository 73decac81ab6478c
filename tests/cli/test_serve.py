import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from backend.cli.app import main
from backend.cli.serve import server_environment
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from common.openblas import find_openblas, is_wanted, preloading

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
LISTENING = re.compile(r"listening on (127\.0\.0\.1:[1-9]\d*)$")


@pytest.fixture
def start_serving():
    """Start `serve` on a free port, read its log until a text, and stop it."""

    def start(*arguments, until):
        command = [sys.executable, "-m", "backend.cli", "serve", "--addr", "127.0.0.1:0"]
        with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as process:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if until in line:
                    break
            process.send_signal(signal.SIGTERM)
            lines += process.stderr.readlines()
        assert process.returncode == 0
        assert any(until in line for line in lines), lines
        return lines

    return start


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["backend.cli.serve", "--unknown", "x"], ["backend.cli", "serve"]]
)
def test_it_becomes_the_server_with_its_arguments(command):
    arguments = [sys.executable, "-m", *command, "--addr", "127.0.0.1:0"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if listening := LISTENING.search(line.rstrip()):
                break
        with grpc.insecure_channel(listening[1]) as channel:
            ask = backend_pb2_grpc.BackendStub(channel).Health
            reply = ask(pb.HealthMessage(), wait_for_ready=True, timeout=START_TIMEOUT_S)
        # The process that was started is the server: the signal reaches it.
        process.send_signal(signal.SIGTERM)
        lines += process.stderr.readlines()
        assert process.wait(EXIT_TIMEOUT_S) == 0
    assert reply.message == b"OK"
    # A host's own options are the host's business; a person's are checked below.
    ignores = any("ignoring unknown options: --unknown" in line for line in lines)
    assert ignores == ("--unknown" in command)
    assert lines[-1].rstrip().endswith("stopped")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--dashbord", "8098"], "Did you mean '--dashboard'?"),
        (["--port", "7"], "Did you mean --addr HOST:PORT?"),
        (["stop"], "serve takes options only, not 'stop'"),
        (["--addr", "http://localhost:7"], "it has a scheme; write localhost:7"),
        (["--addr", "127.0.0.1:99999"], "'99999' is not a port"),
    ],
)
def test_a_person_is_told_what_serve_does_not_know(arguments, hint):
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.mlx
def test_a_model_that_is_named_is_loaded_at_once(start_serving):
    lines = start_serving("--model", "demo", until="ready: loaded demo (qwen3) at 127.0.0.1:")
    assert "loading demo" in "".join(lines)


@pytest.mark.slow
def test_a_model_that_is_none_ends_the_server_with_its_reason():
    command = [sys.executable, "-m", "backend.cli", "serve", "--addr", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--model", "nope"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "LoadModel of nope failed: there is no model 'nope'" in done.stderr
    assert (
        "CRITICAL backend.rpc.server: nope is not loaded: Model: there is no model" in done.stderr
    )


def test_switched_off_nothing_is_preloaded():
    environment = {"MLX_BACKEND_PRELOAD_BLAS": "0", "PATH": "/bin"}
    assert not is_wanted(environment)
    assert server_environment(environment, None) == environment | {"PYTHONPATH": str(ROOT)}


def test_the_server_is_found_before_other_packages_of_its_name():
    environment = server_environment({"PYTHONPATH": "/other"}, Path("/lib/blas.so"))
    assert environment["PYTHONPATH"] == f"{ROOT}:/other"
    assert environment["LD_PRELOAD"] == "/lib/blas.so"


def test_a_preloaded_library_stands_before_others_and_chosen_threads_stay():
    environment = {"LD_PRELOAD": "/other.so", "OPENBLAS_NUM_THREADS": "3", "HOME": "/h"}
    assert preloading(environment, Path("/lib/blas.so")) == {
        "LD_PRELOAD": "/lib/blas.so:/other.so",
        "OPENBLAS_NUM_THREADS": "3",
        "OPENBLAS_THREAD_TIMEOUT": "4",
        "HOME": "/h",
    }
    assert preloading({}, Path("/lib/blas.so"))["OPENBLAS_NUM_THREADS"] == "1"


def test_an_openblas_that_is_found_can_be_loaded():
    library = find_openblas()
    if library is None:
        pytest.skip("no OpenBLAS here")
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).openblas_get_num_threads"
    subprocess.run([sys.executable, "-c", code], check=True)
