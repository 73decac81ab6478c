"""The backend as a host starts it: a process group of its own, standard input closed."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from waiting import wait_until

from backend.__main__ import EXIT_BROKEN
from backend.cli.server_process import free_port
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from common.openblas import find_openblas
from common.process import usable_cores

ROOT = Path(__file__).resolve().parents[2]
RUN_SH = str(ROOT / "run.sh")
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
SESAME = "s3cret"
UNSENDABLE = "ü"
LISTENING = re.compile(r"listening on 127\.0\.0\.1:([1-9]\d*)$")
DASHBOARD = re.compile(r"dashboard on http://127\.0\.0\.1:([1-9]\d*)/$")
MOST_THREADS = re.compile(r"threads for each matrix product: \d+ of at most (\d+)$")
METRICS = re.compile(r"metrics on 127\.0\.0\.1:([1-9]\d*)$")


pytestmark = pytest.mark.slow


class Backend:
    """A started `run.sh`, its output in files as a host keeps them."""

    def __init__(self, arguments, *, command, directory, output, environment):
        self.port = free_port()
        self.stderr = output / "stderr"
        addressed = [argument.format(port=self.port) for argument in arguments]
        with (output / "stdout").open("ab") as stdout, self.stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command, *addressed],
                cwd=directory,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                process_group=0,
            )

    def health(self, **options):
        """Ask until there is an answer, as a host does."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            ask = backend_pb2_grpc.BackendStub(channel).Health
            options = {"wait_for_ready": True, "timeout": START_TIMEOUT_S} | options
            return ask(pb.HealthMessage(), **options).message

    def stop(self):
        """Signal the whole group, and return the exit code."""
        os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(EXIT_TIMEOUT_S)

    def lines(self):
        return self.stderr.read_text().splitlines()

    def announced(self, pattern):
        """Wait for the line with a number; `Health` answers before there are other servers."""
        found = wait_until(lambda: list(filter(None, map(pattern.search, self.lines()))))
        return found[0][1]


@pytest.fixture
def start(tmp_path):
    """Start backends; those that still run at the end are killed."""
    with contextlib.ExitStack() as cleanup:

        def starter(*arguments, command=(RUN_SH,), directory=tmp_path, **environment):
            backend = Backend(
                arguments,
                command=command,
                directory=directory,
                output=tmp_path,
                environment=os.environ | environment,
            )
            cleanup.callback(backend.process.wait)
            cleanup.callback(backend.process.kill)
            return backend

        yield starter


def connected(address):
    """Return a connection that says nothing."""
    connection = socket.create_connection(address, START_TIMEOUT_S)
    connection.setblocking(False)
    return connection


def is_open(connection):
    """Tell whether the server has not closed it."""
    try:
        while connection.recv(2**16):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    return False


def test_of_few_descriptors_connections_take_a_half_and_models_load_and_answer(start):
    limited = ("/bin/sh", "-c", 'ulimit -n 80 && exec "$@"', "sh", RUN_SH)
    backend = start("--addr", "127.0.0.1:{port}", command=limited)
    with contextlib.ExitStack() as ends:
        channel = ends.enter_context(grpc.insecure_channel(f"127.0.0.1:{backend.port}"))
        stub = backend_pb2_grpc.BackendStub(channel)
        ready = stub.Health(pb.HealthMessage(), wait_for_ready=True, timeout=START_TIMEOUT_S)
        assert ready.message == b"OK"
        address = ("127.0.0.1", backend.port)
        others = [ends.enter_context(connected(address)) for _ in range(80)]
        wait_until(lambda: sum(map(is_open, others)) == 80 // 2 - 1)
        assert stub.LoadModel(pb.ModelOptions(Model="demo"), timeout=START_TIMEOUT_S).success
        long = pb.PredictOptions(Prompt="ab" * 100_000)
        assert stub.TokenizeString(long, timeout=START_TIMEOUT_S).length > 0
        hello = pb.Message(role="user", content="Hello!")
        chat = pb.PredictOptions(UseTokenizerTemplate=True, Messages=[hello], Tokens=1)
        assert stub.Predict(chat, timeout=START_TIMEOUT_S).tokens == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--addr", "127.0.0.1:{port}"],
        ["--debug", "extra", "--addr", "0.0.0.0:{port}"],
    ],
)
def test_a_host_starts_asks_and_stops_it(start, arguments):
    backend = start(*arguments)
    assert backend.health() == b"OK"
    assert backend.stop() == 0
    assert backend.lines()[-1].endswith("stopped")


@pytest.mark.mlx
@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
@pytest.mark.parametrize(("given", "is_cast"), [({}, True), ({"DType": "bfloat16"}, False)])
@pytest.mark.one_in(2)
def test_a_model_of_16_bits_is_computed_in_float32_unless_the_host_says_otherwise(
    start, bfloat16_model, given, is_cast
):
    backend = start("--addr", "127.0.0.1:{port}", MLX_BACKEND_PRELOAD_BLAS="1")
    with grpc.insecure_channel(f"127.0.0.1:{backend.port}") as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        model = pb.ModelOptions(Model=str(bfloat16_model), **given)
        assert stub.LoadModel(model, wait_for_ready=True).success
        prompt = "ba be bi bo bu ba be bi"
        assert stub.Predict(pb.PredictOptions(Prompt=prompt, Tokens=4, IgnoreEOS=True)).tokens == 4
    assert any("bfloat16 is cast to float32" in line for line in backend.lines()) == is_cast


@pytest.mark.mlx
@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
def test_a_quantised_model_writes_with_openblas_what_it_writes_without(
    start, tiny_models, tmp_path
):
    from mlx_lm import convert

    quantised = tmp_path / "quantised"
    convert(str(tiny_models("llama")), str(quantised), quantize=True, q_group_size=32)
    written = []
    for preload in "01":
        backend = start("--addr", "127.0.0.1:{port}", MLX_BACKEND_PRELOAD_BLAS=preload)
        with grpc.insecure_channel(f"127.0.0.1:{backend.port}") as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            stub.LoadModel(pb.ModelOptions(Model=str(quantised)), wait_for_ready=True)
            request = pb.PredictOptions(Prompt="ba be bi bo bu " * 8, Tokens=24, IgnoreEOS=True)
            written.append(stub.Predict(request).message)
    assert written[0] == written[1] != b""


@pytest.mark.mlx
@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
def test_a_quantised_model_is_dequantised_unless_an_option_says_otherwise(start, tmp_path):
    from mlx_lm import convert

    from scripts.tiny_models import build_llama

    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    build_llama(plain, hidden=384, layers=8, vocab=12288, dtype="bfloat16")
    convert(str(plain), str(quantised), quantize=True, q_bits=8)
    written = []
    backend = start("--addr", "127.0.0.1:{port}", MLX_BACKEND_PRELOAD_BLAS="1")
    with grpc.insecure_channel(f"127.0.0.1:{backend.port}") as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        for chosen in ({}, {"DType": "float32"}, {"Options": ["dequantize:false"]}):
            model = pb.ModelOptions(Model=str(quantised), **chosen)
            assert stub.LoadModel(model, wait_for_ready=True).success
            request = pb.PredictOptions(Prompt="ba be bi bo bu " * 8, Tokens=24, IgnoreEOS=True)
            written.append(stub.Predict(request).message)
    assert written[0] == written[1] == written[2] != b""
    lines = [line for line in backend.lines() if "are dequantised to float32" in line]
    assert len(lines) == 2
    assert any("the kernels in C are ready" in line for line in backend.lines())
    named = [line for line in backend.lines() if "OpenBLAS multiplies with its kernels" in line]
    is_new = " avx2 " in Path("/proc/cpuinfo").read_text()
    assert named
    assert not (is_new and any("Prescott" in line for line in named))


@pytest.mark.mlx
@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
@pytest.mark.parametrize(("given", "most"), [({}, usable_cores()), ({"Threads": 1}, 1)])
def test_matrix_products_take_no_more_threads_than_cores_and_host_allow(start, given, most):
    backend = start("--addr", "127.0.0.1:{port}", MLX_BACKEND_PRELOAD_BLAS="1")
    with grpc.insecure_channel(f"127.0.0.1:{backend.port}") as channel:
        load = backend_pb2_grpc.BackendStub(channel).LoadModel
        loaded = load(
            pb.ModelOptions(Model=str(ROOT / "backend/demo/model"), DType="float32", **given),
            wait_for_ready=True,
        )
    assert loaded.success
    assert int(backend.announced(MOST_THREADS)) == most


HEAP_BYTES = 64 * 2**20


def heaps_of(pid):
    """Return the addresses of glibc's heaps beside the first.

    They lie at multiples of their size, and the part not used yet is reserved: other mappings may
    lie there too, by chance.
    """
    reserved = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s*\n\2-([0-9a-f]+) ---p",
        Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return [
        begin
        for begin, _, end in reserved
        if int(begin, 16) % HEAP_BYTES == 0 and int(end, 16) - int(begin, 16) == HEAP_BYTES
    ]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="it is glibc's")
def test_its_threads_share_one_heap_beside_the_first_unless_the_environment_says_otherwise(start):
    ours, other = (
        start("--addr", "127.0.0.1:{port}"),
        start("--addr", "127.0.0.1:{port}", MALLOC_ARENA_MAX="16"),
    )
    for backend in (ours, other):
        assert backend.health() == b"OK"
    # Threads begin when they are needed, and each may bring a heap.
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while len(heaps_of(other.process.pid)) <= 1:
        assert time.monotonic() < deadline
        assert other.health() == b"OK"
    assert len(heaps_of(ours.process.pid)) <= 1


def test_it_starts_by_its_basename(start):
    backend = start("--addr=127.0.0.1:{port}", command=("/bin/sh", "run.sh"), directory=ROOT)
    assert backend.health() == b"OK"
    assert backend.stop() == 0
    assert backend.lines()[-1].endswith("stopped")


def test_packages_in_the_working_directory_are_not_ours(start, tmp_path):
    for name in ("backend", "common", "grpc"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported the wrong one')")
    assert start("--addr=127.0.0.1:{port}").health() == b"OK"


def test_the_process_that_was_started_is_the_server(start):
    backend = start("--addr=127.0.0.1:{port}")
    assert backend.health() == b"OK"
    backend.process.send_signal(signal.SIGINT)
    assert backend.process.wait(EXIT_TIMEOUT_S) == 0


SERVE = (sys.executable, "-P", "-m", "backend.cli.serve")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("command", [(RUN_SH,), SERVE], ids=["run.sh", "serve"])
@pytest.mark.parametrize("output", ["2>/dev/full", ">&- 2>&-"])
def test_output_that_nothing_takes_does_not_keep_it_from_serving(start, output, command):
    shell = ("/bin/sh", "-c", f'exec "$@" {output}', "sh")
    found = {"PYTHONPATH": str(ROOT)}
    backend = start("--addr=127.0.0.1:{port}", command=(*shell, *command), **found)
    assert backend.health() == b"OK"
    places = [Path(f"/proc/{backend.process.pid}/fd/{number}").readlink() for number in range(3)]
    # Nothing else has taken the numbers.
    assert all(place.is_relative_to("/dev") or place.exists() for place in places)
    assert backend.stop() == 0


def test_a_reader_of_its_log_that_is_gone_does_not_keep_it_from_serving():
    reader, writer = os.pipe()
    os.close(reader)
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen([RUN_SH, f"--addr={address}"], stderr=writer)
    os.close(writer)
    with process, grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
        process.terminate()
    assert process.returncode == 0


def test_python_itself_starts_without_standard_input(start):
    backend = start(
        "--addr=127.0.0.1:{port}", command=(sys.executable, "-m", "backend"), directory=ROOT
    )
    assert backend.health() == b"OK"
    assert backend.stop() == 0


def test_a_taken_port_is_told_in_the_last_line(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        backend = start(f"--addr=127.0.0.1:{port}")
        assert backend.process.wait(START_TIMEOUT_S) == 1
    assert backend.lines()[-1].endswith(
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "stop the process that listens there, or use another port (0: any)"
    )


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("nowhere", "it has no port; write nowhere:50051"),
        ("192.0.2.1:5000", "Cannot assign requested address; this machine has no such address"),
    ],
)
def test_a_bad_address_is_told_in_the_last_line(start, address, problem):
    backend = start("--addr", address)
    assert backend.process.wait(START_TIMEOUT_S) == 1
    assert f"cannot listen on {address}: {problem}" in backend.lines()[-1]


def test_an_unknown_log_level_is_refused_in_the_last_line(start):
    backend = start("--addr", "127.0.0.1:{port}", MLX_BACKEND_LOG_LEVEL="loud")
    assert backend.process.wait(START_TIMEOUT_S) == 1
    assert backend.lines()[-1].endswith(
        "MLX_BACKEND_LOG_LEVEL: 'loud' is none of trace, debug, info, warn, warning, error"
    )


def test_port_0_takes_a_free_one_and_logs_it():
    with subprocess.Popen(
        [RUN_SH, "--addr=127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as process:
        lines = iter(process.stderr.readline, "")
        port = next(match[1] for line in lines if (match := LISTENING.search(line)))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
        process.terminate()


def test_the_dashboard_is_served_on_loopback_and_metrics_on_an_address_of_their_own(start):
    options = ("--dashboard", "0", "--metrics-addr", "127.0.0.1:0")
    backend = start("--addr=127.0.0.1:{port}", *options)
    assert backend.health() == b"OK"
    port = backend.announced(DASHBOARD)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/inspect") as reply:
        assert b'"state": "UNINITIALIZED"' in reply.read()
    port = backend.announced(METRICS)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        assert b'mlx_backend_state{state="uninitialized"} 1.0' in reply.read()
    assert backend.stop() == 0


@pytest.mark.parametrize("option", ["--metrics-addr", "--dashboard"])
def test_a_server_that_cannot_serve_all_ends_with_the_option_and_no_socket(start, tmp_path, option):
    path = tmp_path / "backend.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        backend = start(f"--addr=unix:{path}", option, address)
        assert backend.process.wait(START_TIMEOUT_S) == 1
    assert f"{option}: cannot listen on {address}" in backend.lines()[-1]
    assert not path.exists()


def test_a_second_signal_late_in_the_stop_leaves_no_socket(start, tmp_path):
    path = tmp_path / "backend.sock"
    backend = start(f"--addr=unix:{path}")
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        wait_until(path.exists)
        stub.LoadModel(pb.ModelOptions(Model="demo"), wait_for_ready=True)
        stream = stub.PredictStream(pb.PredictOptions(Prompt="Once", IgnoreEOS=True))
        next(stream)
        backend.process.terminate()
        wait_until(lambda: any("finishing running work" in line for line in backend.lines()))
        with contextlib.suppress(grpc.RpcError):
            for _ in stream:
                backend.process.terminate()
        assert backend.process.wait(EXIT_TIMEOUT_S) == -signal.SIGTERM
    assert not path.exists()


INTERRUPTED = """
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "backend.config":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("backend", run_name="__main__", alter_sys=True)
"""


def test_an_interrupt_during_the_imports_ends_it_without_a_traceback():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", INTERRUPTED]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == b""


def test_an_address_that_is_none_ends_the_start_and_names_its_option(start):
    backend = start("--addr=127.0.0.1:{port}", "--metrics-addr", "127.0.0.1:many")
    assert backend.process.wait(START_TIMEOUT_S) == 1
    assert "--metrics-addr: cannot listen on 127.0.0.1:many: " in backend.lines()[-1]


def test_a_token_that_no_caller_can_send_ends_the_start(start):
    backend = start("--addr=127.0.0.1:{port}", LOCALAI_GRPC_AUTH_TOKEN=UNSENDABLE)
    assert backend.process.wait(START_TIMEOUT_S) == 1
    assert "LOCALAI_GRPC_AUTH_TOKEN: no caller can send it" in backend.lines()[-1]


def test_with_a_token_even_health_wants_it(start):
    backend = start("--addr=127.0.0.1:{port}", LOCALAI_GRPC_AUTH_TOKEN=SESAME)
    with pytest.raises(grpc.RpcError) as caught:
        backend.health()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert backend.health(metadata=(("authorization", f"Bearer {SESAME}"),)) == b"OK"


def fill(descriptor):
    """Write to a pipe until nothing goes in any more, through an open file of its own."""
    with Path(f"/proc/self/fd/{descriptor}").open("wb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), False)
        while pipe.write(b"x"):
            pass


@pytest.fixture
def unread_log():
    """Both ends of a pipe for stderr."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


@pytest.mark.skipif(sys.platform != "linux", reason="fills the pipe by its path below /proc")
def test_a_log_that_nobody_reads_stops_neither_answers_nor_the_end(unread_log):
    reader, writer = unread_log
    port = free_port()
    command = [RUN_SH, f"--addr=127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=writer) as process, contextlib.ExitStack() as cleanup:
        cleanup.callback(process.kill)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
            fill(writer)
            os.close(writer)
            stub = backend_pb2_grpc.BackendStub(channel)
            for _ in range(10):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.LoadModel(pb.ModelOptions(Model="/nowhere"), timeout=START_TIMEOUT_S)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert stub.Health(pb.HealthMessage(), timeout=START_TIMEOUT_S).message == b"OK"
        process.terminate()
        assert process.wait(EXIT_TIMEOUT_S) == 0
    assert set(os.read(reader, 2**16).splitlines()[-1]) == set(b"x")


def test_a_parent_that_died_before_python_ran_ends_the_process(start):
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    command = (sys.executable, "-m", "backend")
    backend = start(command=command, directory=ROOT, MLX_BACKEND_PARENT=str(gone.pid))
    assert backend.process.wait(START_TIMEOUT_S) == 1
    assert backend.lines()[-1].endswith(f"parent process {gone.pid} is gone: exiting")


PARENT = f"""
import subprocess, sys
subprocess.Popen([{RUN_SH!r}, *sys.argv[1:]])
sys.stdin.readline()
"""


def test_it_ends_with_its_parent():
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "--addr", f"127.0.0.1:{port}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": "50ms"},
    )
    with parent:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
        parent.kill()
        # The backend holds the pipe's other end: it closes when the backend is gone.
        assert "is gone: exiting" in parent.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="fills the pipe by its path below /proc")
def test_it_ends_with_its_parent_when_nobody_reads_its_log():
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "--addr", f"127.0.0.1:{port}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": "50ms"},
    )
    with parent, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
        fill(parent.stderr.fileno())
        parent.kill()
        parent.wait()
        until_gone(channel)


def until_gone(channel):
    """Wait for the end of the process at the other side."""
    gone = threading.Event()

    def see(state):
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.IDLE):
            gone.set()

    channel.subscribe(see)
    assert gone.wait(EXIT_TIMEOUT_S)


# SIGUSR1 ends the task of gRPC that accepts calls.
DEAFENED = """
import signal

def deafen(*_):
    import asyncio
    for task in asyncio.all_tasks():
        if task.get_coro().__qualname__ == "AioServer._server_main_loop":
            task.cancel()

signal.signal(signal.SIGUSR1, deafen)
"""


@pytest.mark.mlx
def test_a_server_that_accepts_no_calls_lets_streams_finish_and_ends_with_a_code(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEAFENED, encoding="utf-8")
    backend = start("--addr", "127.0.0.1:{port}", PYTHONPATH=str(tmp_path))
    assert backend.health() == b"OK"
    with grpc.insecure_channel(f"127.0.0.1:{backend.port}") as channel:
        stub = backend_pb2_grpc.BackendStub(channel)
        assert stub.LoadModel(pb.ModelOptions(Model="demo"), timeout=START_TIMEOUT_S).success
        request = pb.PredictOptions(Prompt="Once", Tokens=100, IgnoreEOS=True)
        replies = stub.PredictStream(request, timeout=START_TIMEOUT_S)
        next(replies)
        backend.process.send_signal(signal.SIGUSR1)
        assert list(replies)[-1].tokens == 100
    assert backend.process.wait(EXIT_TIMEOUT_S) == EXIT_BROKEN
    told = [line for line in backend.lines() if "CRITICAL" in line or "ERROR" in line]
    assert "accepts no calls any more" in told[-2]
    assert "nothing can be served: ending with code 3" in told[-1]
