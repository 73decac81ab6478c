"""Fixtures for every suite: tiny random models, built once per run and shared by its workers."""

import gc
import importlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from filelock import FileLock
from hypothesis import HealthCheck, Phase, settings
from nursery import Nursery, forked_engines

from backend.engine import engine, processes
from backend.engine.findings import FindingsStore
from backend.model.checkpoint.upstream import INDEX_NAME, index_transformers
from common.directories import NAME
from scripts.faulty_rank import FAULTY_BOOT, VARIABLE

# The same examples every time, however slow the machine is; half of the usual number, since the
# first find most, and all are run at each change.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")
# `pytest tests/fuzz --hypothesis-profile=long` takes minutes, and looks further.
settings.register_profile("long", derandomize=False, max_examples=3000)
# `make mutate` asks whether an example fails, and not for the smallest.
settings.register_profile("quick", phases=[Phase.explicit, Phase.generate], max_examples=50)


# Results are compared to the last digits of float32, to which a GPU computes only without TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-thorough` run the cases that `make test` leaves out."""
    parser.addoption("--thorough", action="store_true", help="run all cases of tests of `one_in`")


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores: each often waits for a process of its own."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return 1 + (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


# Whatever parameters a test has, multiples of it spread over the cases evenly.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests that are marked `one_in`; the first case always runs."""
    if config.option.thorough:
        return
    families: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            name = item.nodeid.partition("[")[0]
            families.setdefault((name, mark.args[0]), []).append(item)
    left_out: dict[pytest.Item, None] = {}
    for (_, share), cases in families.items():
        places = sorted(range(len(cases)), key=lambda place: place * _GOLDEN_RATIO % 1)
        left_out |= dict.fromkeys(cases[place] for place in places[-(-len(cases) // share) :])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


# Code that earlier runs have compiled, and their index of transformers.
_KEPT = Path(tempfile.gettempdir(), "mlx")

# Jobs have the lowest priority: beside tests of a usual one they get a hundredth of a core.
_NICENESS = 10


def pytest_configure() -> None:
    """Index transformers, and have tests wait for their turn, with a priority near that of jobs.

    MLX hands each operation to a thread of its own, which would interrupt the one that describes
    the next: of tiny models that takes a third of the processor time.
    """
    index_transformers(_KEPT)
    os.nice(max(0, _NICENESS - os.getpriority(os.PRIO_PROCESS, 0)))
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # A sandbox may forbid it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: nearly all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the tests themselves and mlx-lm out of the garbage collection at each load."""
    if any(item.get_closest_marker("mlx") for item in session.items):
        importlib.import_module("backend.model.checkpoint.upstream").import_mlx_lm()
        # Sessions here compute as those of engine processes do.
        importlib.import_module("backend.cpu.install").install()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Have a worker send the reports that are shown, and none of a setup or teardown that passed.

    To send and take the five messages about a test costs as much as two thirds of a short test.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


# A run of so many tests has an engine in every worker, sooner or later.
MANY_TESTS = 2000


@pytest.fixture(scope="session", autouse=True)
def nursery(
    request: pytest.FixtureRequest,
    state_directory: Path,  # noqa: ARG001 (set in the environment)
    shared_directory: Path,
) -> Iterator[Nursery]:
    """Engines that need not import anything, unless a test starts a backend of its own."""
    at_once = len(request.session.items) >= MANY_TESTS
    with forked_engines(at_once=at_once) as nursery, pytest.MonkeyPatch.context() as patch:
        # Later engines of the run take over the findings of earlier ones.
        file = shared_directory / "findings.json"
        patch.setenv("MLX_BACKEND_FINDINGS", str(file))
        patch.setattr(engine, "FindingsStore", partial(_kept_findings, file))
        yield nursery


@pytest.fixture
def with_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that has later engines of the test start with a fault."""

    def install(fault: str) -> None:
        monkeypatch.setenv(VARIABLE, fault)
        monkeypatch.setattr(processes, "BOOT", FAULTY_BOOT)

    return install


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only item is the monotonic time in seconds, which a test sets."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def _kept_findings(file: Path, path: Path | None = None) -> FindingsStore:
    return FindingsStore(path or file)


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory: servers that tests start share no memory with others of this user."""
    directory = tmp_path_factory.mktemp("state")
    # Backends use the kernels that MLX has compiled here and in earlier runs: each takes a second.
    temporary = directory / NAME / "tmp"
    _KEPT.mkdir(exist_ok=True)
    temporary.mkdir(mode=0o700, parents=True)
    (temporary / _KEPT.name).symlink_to(_KEPT)
    # Likewise the index of transformers, for which a process would read 1,600 files.
    with suppress(OSError):
        shutil.copy2(_KEPT / INDEX_NAME, directory / NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(directory))
        yield directory


TinyModels = Callable[[str], Path]


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the workers of one run share; whoever writes there locks."""
    base = tmp_path_factory.getbasetemp()
    # pytest-xdist gives each worker a directory in that of the run.
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared = base / "shared"
    shared.mkdir(exist_ok=True)
    return shared


def _built_once(script: str, shared: Path) -> TinyModels:
    build = importlib.import_module(f"scripts.{script}").build

    def directory(family: str) -> Path:
        built = shared / script / family
        if not built.is_dir():
            built.parent.mkdir(exist_ok=True)
            with FileLock(f"{built}.lock"):
                if not built.is_dir():
                    build(family, Path(f"{built}.part")).rename(built)
        return built

    return cache(directory)


@pytest.fixture(scope="session")
def tiny_models(shared_directory: Path) -> TinyModels:
    """Build a tiny model of a family on first use and return its directory."""
    return _built_once("tiny_models", shared_directory)


@pytest.fixture(scope="session")
def tiny_vision_models(shared_directory: Path) -> TinyModels:
    """Build a tiny model that sees on first use and return its directory."""
    return _built_once("tiny_vision", shared_directory)


@pytest.fixture(scope="session")
def bfloat16_model(shared_directory: Path) -> Path:
    """Build a model of 16 bits that is large enough for a CPU to compute it in float32."""
    from scripts.tiny_models import build_llama

    built = shared_directory / "bfloat16_model"
    with FileLock(f"{built}.lock"):
        if not built.is_dir():
            part = Path(f"{built}.part")
            build_llama(part, hidden=256, layers=8, vocab=8192, dtype="bfloat16").rename(built)
    return built


@pytest.fixture(scope="session")
def networks(tiny_models: TinyModels) -> Callable[[str], Any]:
    """Load a tiny network of a family, mended as any load does, once."""
    loaded: dict[str, Any] = {}

    def network(family: str) -> Any:
        if family not in loaded:
            from backend.model.checkpoint.mends import mend
            from backend.model.checkpoint.upstream import import_mlx_lm

            loaded[family] = import_mlx_lm().load_model(tiny_models(family))[0]
            mend(loaded[family])
        return loaded[family]

    return network


@pytest.fixture
def small_disk(tmp_path: Path) -> Callable[[int], Sequence[str]]:
    """Return a function from a size to the words that run a command with such a disk here."""
    from benchmarks.soak.host import on_small_disk

    def words(size_bytes: int) -> Sequence[str]:
        try:
            return on_small_disk(tmp_path, size_bytes)
        except OSError as error:
            pytest.skip(f"this system does not let users mount: {error}")

    return words
