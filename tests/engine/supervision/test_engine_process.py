"""The engine process takes nothing along that it should not have, and outlives nobody."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest
from groups import is_alive, workers_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import Stub, served
from waiting import until, wait_until

from backend.pb import backend_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Server:
    """`python -m backend`, with secrets in its environment and a file open for its children."""

    def __init__(self, directory):
        secrets = {"LOCALAI_GRPC_AUTH_TOKEN": "", "HF_TOKEN": "hf", "AWS_SECRET_ACCESS_KEY": "aws"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "backend", "--addr", "127.0.0.1:0"],
            stderr=subprocess.PIPE,
            env={**os.environ, **secrets, "PYTHONPATH": str(Path(__file__).parents[3])},
            cwd=directory,
            text=True,
        )
        line = ""
        while "listening on" not in line:
            line = self.process.stderr.readline()
        self.address = line.split()[-1]

    @property
    def engine(self):
        """The number of the engine process, once there is one."""
        wait_until(lambda: len(workers_of(self.process.pid)) == 1)
        return workers_of(self.process.pid)[0]

    def end(self):
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()


def open_files(process_id):
    found = set()
    for each in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(each.readlink()))
    return found


def has(library, process_id):
    return library in Path(f"/proc/{process_id}/maps").read_text()


@contextmanager
def running(directory):
    server = Server(directory)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture
def server(tmp_path):
    with running(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A server that no test ends, its directory, and the engine that it had before any load."""
    directory = tmp_path_factory.mktemp("place")
    with running(directory) as server:
        yield server, directory, server.engine


@linux_only
@pytest.mark.mlx
async def test_it_is_started_before_a_load_and_inherits_neither_files_nor_secrets_nor_place(
    lasting,
):
    server, directory, engine = lasting
    place = Path(f"/proc/{engine}")
    await until(lambda: place.joinpath("cwd").readlink() == Path("/"))
    environment = place.joinpath("environ").read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in environment}
    assert "PATH" in names
    assert not names & {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LOCALAI_GRPC_AUTH_TOKEN"}
    targets = open_files(engine)
    sockets = {target for target in targets if target.startswith("socket:")}
    assert not sockets & open_files(server.process.pid)
    assert not [target for target in targets if str(directory) in target]


@linux_only
@pytest.mark.mlx
async def test_it_is_the_first_to_go_when_memory_runs_out(lasting):
    server, _, engine = lasting

    def score(process_id):
        return int(Path(f"/proc/{process_id}/oom_score_adj").read_text())

    await until(lambda: score(engine) > score(server.process.pid))


@linux_only
@pytest.mark.mlx
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_ends_takes_it_along(server, tiny_models, kind):
    async with grpc.aio.insecure_channel(server.address) as channel:
        await Stub(channel).LoadModel(pb.ModelOptions(Model=str(tiny_models("llama"))))
    engine = server.engine
    server.process.send_signal(kind)
    server.process.wait()
    await until(lambda: not is_alive(engine))


@linux_only
@pytest.mark.mlx
async def test_a_server_whose_engine_cannot_be_replaced_exits_with_a_code_of_its_own(
    server, tiny_models, tmp_path
):
    model = tmp_path / "model"
    model.symlink_to(tiny_models("llama"))
    async with grpc.aio.insecure_channel(server.address) as channel:
        await Stub(channel).LoadModel(pb.ModelOptions(Model=str(model)))
    model.unlink()
    os.kill(server.engine, signal.SIGKILL)
    _, log = server.process.communicate()
    assert server.process.returncode == 3
    assert "3 in a row could not be started" in log


@linux_only
@pytest.mark.mlx
async def test_a_server_that_is_to_stay_serves_nothing_until_a_load_works(tiny_models, tmp_path):
    model = tmp_path / "model"
    model.symlink_to(tiny_models("llama"))
    options = pb.ModelOptions(Model=str(model), Options=["exit_when_broken:false"])
    async with served() as backend:
        health = health_pb2_grpc.HealthStub(backend.channel)
        # The server process exits when this ends.
        broken = asyncio.ensure_future(backend.engine.wait_until_broken())
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await backend.stub.LoadModel(options)
        model.unlink()
        os.kill(backend.engine.process_id, signal.SIGKILL)
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="3 in a row could not be started"):
            await backend.stub.Health(pb.HealthMessage())
        model.symlink_to(tiny_models("llama"))
        await backend.stub.LoadModel(options)
        assert (await watch.read()).status == SERVING
        assert (await backend.stub.Health(pb.HealthMessage())).message == b"OK"
        watch.cancel()
        assert not broken.done()
        broken.cancel()


@linux_only
@pytest.mark.mlx
async def test_the_server_never_imports_mlx_or_llguidance(lasting, tiny_models):
    server, *_ = lasting
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        await stub.LoadModel(pb.ModelOptions(Model=str(tiny_models("llama"))))
        await stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=3, Grammar='root ::= "ba"'))
    for library in ("libmlx", "llguidance"):
        assert not has(library, server.process.pid)
        assert has(library, server.engine)
