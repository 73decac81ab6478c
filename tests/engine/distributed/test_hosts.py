"""Ranks that an operator starts: on a host of its own, and as `mlx.launch` would."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from groups import build_divisible, is_alive, workers_of
from one_group import tokens_of_one_group
from two_hosts import ADDRESSES, two_hosts
from waiting import until

from backend.errors import BackendError
from backend.rank import device_environment, named_topology, parse

pytestmark = pytest.mark.mlx

ONE_GROUP = Path(__file__).parents[2] / "support" / "one_group.py"


def tokens(directory, tuning, prefix=()):
    paths = os.pathsep.join([str(ONE_GROUP.parent), os.environ.get("PYTHONPATH", "")])
    command = [*prefix, sys.executable, str(ONE_GROUP), str(directory), json.dumps(tuning)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    return done.stdout


@contextmanager
def operator(*command, stderr=None, **environment):
    """Run a worker as an operator does, and stop it as one does."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=stderr)
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture
def hosts():
    with two_hosts() as hosts:
        if hosts is None:
            pytest.skip("this machine lets nobody make network namespaces")
        yield hosts


async def test_two_hosts_give_the_tokens_of_one_and_serve_one_group_after_another(tmp_path, hosts):
    here, there = hosts
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": a, "ips": [a]} for a in ADDRESSES]))
    worker = [*there, sys.executable, "-m", "backend.rank"]
    with operator(*worker, MLX_RANK="1", MLX_HOSTFILE=str(hostfile)) as process:
        for family, kind in (("llama", "tensor"), ("qwen3_moe", "pipeline")):
            directory = build_divisible(family, tmp_path / family, 2)
            tuning = {"hostfile": str(hostfile), "distributed": kind}
            together = tokens(directory, tuning, here)
            assert json.loads(together) == await tokens_of_one_group(directory, {})
        assert is_alive(process.pid)


def arguments(*given, **environment):
    return parse(given, environment)


def test_the_command_line_wins_over_the_environment(tmp_path):
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([["10.0.0.1:7000"], ["10.0.0.2:7000"]]))
    launched = arguments(MLX_RANK="1", MLX_HOSTFILE=str(hostfile))
    assert (launched.rank, named_topology(launched).size) == (1, 2)
    assert arguments("--rank", "0", MLX_RANK="1").rank == 0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((), "--hostfile FILE or --hosts ADDRESS,ADDRESS is needed.*--rank N"),
        (("--rank", "1"), "--hostfile FILE or --hosts"),
        (("--hosts", "a,b"), "--rank must be between 0 and 1"),
        (("--hosts", "a,b", "--rank", "2"), "--rank must be between 0 and 1"),
    ],
)
def test_a_worker_that_does_not_know_its_place_says_so(given, problem):
    with pytest.raises(BackendError, match=problem):
        named_topology(arguments(*given))


def test_ranks_of_one_machine_take_its_devices_in_turn():
    two = {"CUDA_VISIBLE_DEVICES": "4,7"}
    assert [device_environment(n, two)["CUDA_VISIBLE_DEVICES"] for n in (0, 1, 2)] == [
        "4",
        "7",
        "4",
    ]
    assert device_environment(1, {"CUDA_VISIBLE_DEVICES": "4"}) == {}


def test_the_help_of_a_worker_has_the_name_of_its_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"], {})
    assert capsys.readouterr().out.startswith("usage: mlx-grpc-backend rank ")


def test_rank_0_that_an_operator_starts_says_that_it_is_not_needed_and_leaves_when_told():
    hosts = "127.0.0.1:32330,127.0.0.1:32340"
    command = [sys.executable, "-m", "backend.rank", "--hosts", hosts, "--rank", "0"]
    with operator(*command, stderr=subprocess.PIPE) as process:
        assert b"nothing to do here" in process.stderr.readline()
        process.stderr.close()


def device_of(process_id):
    """Return the device that a worker was started with; None before it has its command line."""
    given = Path(f"/proc/{process_id}/cmdline").read_bytes().decode().split("\0")
    return given[given.index("--device") + 1] if "--device" in given else None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_worker_takes_the_device_of_its_place_on_its_machine():
    hosts = "127.0.0.1:32350,192.0.2.7,127.0.0.1:32360"
    command = [sys.executable, "-m", "backend.rank", "--hosts", hosts, "--rank", "2"]
    with operator(*command) as process:
        await until(lambda: workers_of(process.pid))
        (worker,) = workers_of(process.pid)
        await until(lambda: device_of(worker))
        assert device_of(worker) == "1"
