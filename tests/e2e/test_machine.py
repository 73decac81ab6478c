"""Three backends on one machine that is too small for the memory that each would take alone."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_process import TIMEOUT_S, real_backends
from waiting import wait_until

from backend.pb import backend_pb2 as pb
from common.machine_memory import machine_bytes

pytestmark = pytest.mark.mlx

# A row of 4096 tokens takes 2 MiB, the weights half a MiB.
USABLE_BYTES = 4 * 2**20


def inspect(backend):
    return backend.inspector.Inspect(pb.InspectRequest(), timeout=TIMEOUT_S)


def budget(backend):
    return inspect(backend).memory.breakdown["kv_budget"]


def claimed(machine):
    return sum(each.held_bytes + each.budget_bytes for each in machine.backends)


def share_of_machine():
    """Return the share of this machine's memory with which a backend sees a small one."""
    from backend.engine.rows.admission import working_set_bytes

    return USABLE_BYTES / working_set_bytes()


def say(backend, prompt, tokens):
    options = pb.PredictOptions(Prompt=prompt, Tokens=tokens, IgnoreEOS=True, Temperature=0.0)
    return backend.stub.Predict(options, timeout=TIMEOUT_S).tokens


def load(backend, directory):
    # Without a look at batches a load takes half as long.
    options = {"GPUMemoryUtilization": share_of_machine(), "Options": ["batching:false"]}
    backend.load(directory, **options)


def require_status(backend):
    """Compare `Status` with `Inspect` for a backend that is alone."""
    parts = backend.stub.Status(pb.HealthMessage(), timeout=TIMEOUT_S).memory.breakdown
    (own,) = inspect(backend).machine.backends
    assert (own.is_own, own.held_bytes, own.budget_bytes) == (
        True,
        parts["weights"],
        parts["kv_budget"],
    )
    assert parts["machine_claimed"] == own.held_bytes + own.budget_bytes
    assert parts["machine_usable"] == pytest.approx(USABLE_BYTES, rel=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="a killed server takes its engine along")
def test_three_backends_share_a_machine_that_is_too_small_for_their_wishes(tiny_models, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    environment = {**os.environ, "MLX_BACKEND_LEDGER": str(directory)}
    with real_backends(tmp_path, 3, environment) as backends:
        first, second, third = backends
        model = tiny_models("llama")
        load(first, model)
        require_status(first)
        wish = budget(first)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: load(each, model), (second, third)))
        wait_until(lambda: all(len(inspect(each).machine.backends) == 3 for each in backends))
        wait_until(lambda: claimed(inspect(first).machine) <= USABLE_BYTES)
        assert 3 * wish > USABLE_BYTES
        assert [say(each, "ba " * 100, 20) for each in backends] == [20, 20, 20]
        wait_until(lambda: min(map(budget, backends)) > USABLE_BYTES // 8)
        before = budget(first)
        assert before < wish

        # More than a third of the memory: the idle ones give some of theirs.
        answers = []
        asking = threading.Thread(target=lambda: answers.append(say(third, "ba " * 300, 3000)))
        asking.start()
        wait_until(lambda: budget(first) < before)
        assert claimed(inspect(third).machine) <= USABLE_BYTES
        asking.join()
        assert answers == [3000]
        wait_until(lambda: budget(first) >= before)

        os.kill(second.process.pid, signal.SIGKILL)
        wait_until(lambda: len(inspect(first).machine.backends) == 2)
        wait_until(lambda: budget(first) > before)
        assert [say(each, "ba " * 100, 20) for each in (first, third)] == [20, 20]
        third.stub.Free(pb.HealthMessage(), timeout=TIMEOUT_S)
        wait_until(lambda: budget(first) == wish)


def is_bounded():
    return machine_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not is_bounded(),
    reason="no control group bounds the memory of this process, and a test may not make one; "
    "`systemd-run --user --scope -p MemoryMax=4G` or `docker run --memory 4g` runs it in one",
)
def test_three_backends_share_the_control_group_that_they_are_in(tiny_models, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    environment = {**os.environ, "MLX_BACKEND_LEDGER": str(directory)}
    with real_backends(tmp_path, 3, environment) as backends:
        first, *others = backends
        first.load(tiny_models("llama"), Options=["batching:false"])
        wish = budget(first)
        assert 3 * wish > machine_bytes()
        for each in others:
            each.load(tiny_models("llama"), Options=["batching:false"])
        wait_until(lambda: all(len(inspect(each).machine.backends) == 3 for each in backends))
        assert inspect(first).machine.usable_bytes < machine_bytes()
        wait_until(lambda: claimed(inspect(first).machine) <= inspect(first).machine.usable_bytes)
        assert [say(each, "ba " * 100, 20) for each in backends] == [20, 20, 20]
        for each in others:
            each.stub.Free(pb.HealthMessage(), timeout=TIMEOUT_S)
        wait_until(lambda: budget(first) == wish)
