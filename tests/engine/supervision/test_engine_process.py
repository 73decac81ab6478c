"""The engine process takes nothing along that it should not have, and outlives nobody."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
from groups import is_alive, workers_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import Stub
from waiting import until

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

    async def engine(self):
        """Return the number of the engine process, once there is one."""
        await until(lambda: len(workers_of(self.process.pid)) == 1)
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


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.end()


@linux_only
@pytest.mark.mlx
async def test_it_is_started_before_a_load_and_inherits_neither_files_nor_secrets_nor_place(
    server, tmp_path
):
    place = Path(f"/proc/{await server.engine()}")
    await until(lambda: place.joinpath("cwd").readlink() == Path("/"))
    environment = place.joinpath("environ").read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in environment}
    assert "PATH" in names
    assert not names & {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LOCALAI_GRPC_AUTH_TOKEN"}
    targets = open_files(await server.engine())
    sockets = {target for target in targets if target.startswith("socket:")}
    assert not sockets & open_files(server.process.pid)
    assert not [target for target in targets if str(tmp_path) in target]


@linux_only
@pytest.mark.mlx
async def test_it_is_the_first_to_go_when_memory_runs_out(server):
    engine = await server.engine()

    def score(process_id):
        return int(Path(f"/proc/{process_id}/oom_score_adj").read_text())

    await until(lambda: score(engine) > score(server.process.pid))


@linux_only
@pytest.mark.mlx
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_ends_takes_it_along(server, tiny_models, kind):
    async with grpc.aio.insecure_channel(server.address) as channel:
        await Stub(channel).LoadModel(pb.ModelOptions(Model=str(tiny_models("llama"))))
    engine = await server.engine()
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
    os.kill(await server.engine(), signal.SIGKILL)
    _, log = server.process.communicate()
    assert server.process.returncode == 3
    assert "3 in a row could not be started" in log


@linux_only
@pytest.mark.mlx
async def test_a_server_that_is_to_stay_serves_nothing_until_a_load_works(
    server, tiny_models, tmp_path
):
    model = tmp_path / "model"
    model.symlink_to(tiny_models("llama"))
    options = pb.ModelOptions(Model=str(model), Options=["exit_when_broken:false"])
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub, health = Stub(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await stub.LoadModel(options)
        model.unlink()
        os.kill(await server.engine(), signal.SIGKILL)
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="3 in a row could not be started"):
            await stub.Health(pb.HealthMessage())
        model.symlink_to(tiny_models("llama"))
        await stub.LoadModel(options)
        assert (await watch.read()).status == SERVING
        assert (await stub.Health(pb.HealthMessage())).message == b"OK"
        watch.cancel()
    assert server.process.poll() is None


@linux_only
@pytest.mark.mlx
async def test_the_server_never_imports_mlx_or_llguidance(server, tiny_models):
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        await stub.LoadModel(pb.ModelOptions(Model=str(tiny_models("llama"))))
        await stub.Predict(pb.PredictOptions(Prompt="ba", Tokens=3, Grammar='root ::= "ba"'))
    for library in ("libmlx", "llguidance"):
        assert not has(library, server.process.pid)
        assert has(library, await server.engine())
