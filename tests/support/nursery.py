"""Forks the engines of tests, and their helpers, from one process with their imports.

An engine process spends two thirds of its start on imports. Here it is what `python -m
backend.rank` would be: a child of this process, with its arguments, environment, connection and
stderr, fresh from the imports; likewise a process that renders templates, writes grammars, tries
patterns or reads long texts, and one of a job. As a program, this module is the process that they
are forked from.
"""

import asyncio
import ctypes
import gc
import importlib
import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
SUPPORT = str(Path(__file__).parent)
NAME = "backend.rank"
RANKS = "backend.engine.processes", "start_process"
HELPERS = tuple(
    (module, "start_python")
    for module in (
        "backend.engine.grammars.writer_process",
        "backend.media.decoder_pool",
        "backend.model.text.isolated.long_texts",
        "backend.model.text.isolated.template_pool",
        "backend.model.text.pattern_trial",
    )
)
JOBS = "backend.jobs.job", "start_process"
JOB_NAME = "backend.jobs"
# The modules that an engine or a job would import in the end, for one model or another.
MODULES = (
    *(NAME, "backend.engine.leading.boot", "scripts.faulty_rank"),
    "backend.cpu.install",
    *("backend.sampling.grammar.compiler", "numpy.random", "multiprocessing.synchronize"),
    *("backend.engine.grammars.writing", "backend.media.decoding_process"),
    *(f"backend.model.text.isolated.{name}" for name in ("backtracking", "encoding")),
    *(f"{JOB_NAME}.{name}" for name in ("__main__", "finetuning", "quantization")),
    *("mlx_lm.models.llama", "mlx_lm.models.qwen3", "transformers.models.auto"),
    *("mlx_vlm.utils", "mlx_vlm.models.qwen3_vl", "mlx_vlm.models.gemma4", "PIL.ImageFile"),
)
# All else in the environment might matter to an import.
FREE_NAMES = {
    *("PYTEST_CURRENT_TEST", "MLX_BACKEND_TEST_FAULT", "LOCALAI_LOG_LEVEL"),
    *("MLX_BACKEND_TEST_LATER", "MLX_BACKEND_FINDINGS"),
    # Set by the import itself, in this process too.
    *("TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRANSFORMERS_VERBOSITY"),
}
# In the environment of engines that leave trials for later, as those of the product do.
LATER = "MLX_BACKEND_TEST_LATER"
# In that of engines with a fault.
FAULT = "MLX_BACKEND_TEST_FAULT"
# There MLX starts threads when it is imported, which no fork takes along.
HAS_CUDA = any(each.name.startswith("mlx-cuda") for each in metadata.distributions())
SYSCALL_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
CLONE_PARENT = 0x8000
LIMIT_BYTES = 2**20


class Forked(subprocess.Popen):
    """A child of this process that another one has forked."""

    def __init__(self, arguments: Sequence[str], fork: Callable[[], int]) -> None:
        self._fork = fork
        super().__init__(arguments)

    def _execute_child(self, *_: Any) -> None:
        self.pid = self._fork()
        self._child_created = True


class ForkedJob:
    """A forked job with its pipes, as `asyncio.subprocess.Process` has them."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.stdout = asyncio.StreamReader()

    async def connect(self, commands: int, progress: int) -> None:
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self.stdout)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(progress, "rb"))
        self.stdin, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(commands, "wb")
        )

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        self._process.kill()


class Nursery:
    """Starts processes; one that might differ from a forked one is started as the product does."""

    def __init__(self, orders: socket.socket | None = None) -> None:
        # How the product starts processes, by the module that does and its function.
        self._starts: dict[tuple[str, str], Callable[..., subprocess.Popen]] = {}
        self._environment = _fixed(os.environ)
        # The kernel ends the children with the thread that started the process that forks them.
        self._thread = threading.current_thread()
        self._process: subprocess.Popen | None = None
        self._orders = orders
        self._lock = threading.Lock()

    def install(self) -> None:
        """Start engines here, and from the first one on helpers."""
        self._replace(RANKS, self.start_rank)
        if self._orders is not None:
            for place in HELPERS:
                self._replace(place, self.start_helper)
            self._replace(JOBS, self.start_job)

    def close(self) -> None:
        for (module, name), start in self._starts.items():
            setattr(sys.modules[module], name, start)
        if self._process is not None:
            self._orders.close()
            self._process.wait()

    def start_rank(
        self,
        arguments: Sequence[str],
        *,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen:
        is_alike = environment is None and self._is_alike()
        if not is_alike or threading.current_thread() is not self._thread:
            return self._starts[RANKS](arguments, inherited=inherited, environment=environment)
        words = ["--parent", str(os.getpid()), *arguments]
        return Forked(arguments, lambda: self._fork("rank", words, inherited))

    def start_helper(
        self, module: str, number: int, *, is_heard: bool = False, niceness: int = 0
    ) -> subprocess.Popen:
        if not self._is_alike():
            start = self._starts[HELPERS[0]]
            return start(module, number, is_heard=is_heard, niceness=niceness)
        words = [module, str(int(is_heard)), str(niceness)]
        return Forked([], lambda: self._fork("helper", words, [number]))

    async def start_job(self) -> Any:
        if not self._is_alike():
            return await self._starts[JOBS]()
        commands, orders = os.pipe()
        news, progress = os.pipe()
        process = Forked([], lambda: self._fork("job", [str(Path.cwd())], [commands, progress]))
        for descriptor in (commands, progress):
            os.close(descriptor)
        job = ForkedJob(process)
        await job.connect(orders, news)
        return job

    def _is_alike(self) -> bool:
        """Tell whether a process would start with the imports of a forked one."""
        return not HAS_CUDA and _fixed(os.environ) == self._environment

    def _replace(self, place: tuple[str, str], start: Callable[..., subprocess.Popen]) -> None:
        if place not in self._starts:
            module = importlib.import_module(place[0])
            self._starts[place] = getattr(module, place[1])
            setattr(module, place[1], start)

    def begin(self) -> None:
        """Start the process that others are forked from; from here on helpers are, too."""
        self._orders, theirs = connection()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        self.install()

    def _fork(self, program: str, words: Sequence[str], inherited: Sequence[int]) -> int:
        if self._orders is None:
            self.begin()
        order = [program, words, dict(os.environ), list(inherited)]
        with self._lock:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [2, *inherited])
            return int(self._orders.recv(LIMIT_BYTES))


def connection() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in FREE_NAMES}


@contextmanager
def forked_engines(*, at_once: bool = False) -> Iterator[Nursery]:
    """Have the engines of this process forked, where the system can.

    Helpers are forked from the first engine on, or `at_once`.
    """
    nursery = Nursery()
    if sys.platform == "linux" and SYSCALL_CLONE is not None:
        nursery.install()
        if at_once and not HAS_CUDA:
            nursery.begin()
    try:
        yield nursery
    finally:
        nursery.close()


def fork_sibling() -> int:
    """Fork as `os.fork` does, but a child of this process's own parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    libc = ctypes.PyDLL(None, use_errno=True)
    process_id = libc.syscall(SYSCALL_CLONE, CLONE_PARENT | signal.SIGCHLD, *[0] * 4)
    if process_id == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if process_id < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return process_id


def be_rank(order: Sequence[Any], descriptors: Sequence[int]) -> NoReturn:
    """Become the process of `python -m backend.rank`."""
    from backend import rank
    from scripts import faulty_rank

    _, arguments, environment, numbers = order
    stderr, *inherited = descriptors
    orders = fork_nursery(descriptors)
    for number in (1, 2):
        os.dup2(stderr, number)
    os.close(stderr)
    Path("/proc/self/comm").write_text(NAME)
    os.environ.clear()
    os.environ.update(environment)
    Nursery(orders).install()
    if LATER not in environment:
        try_at_load()
    if FAULT in environment:
        faulty_rank.install(environment[FAULT], arguments)
    given = dict(zip(map(str, numbers), map(str, inherited), strict=True))
    sys.argv = [NAME, *(given.get(word, word) for word in arguments)]
    sys.exit(rank.main())


def try_at_load() -> None:
    """Have engines make their trials at load, not between requests: tests count on it."""
    from backend.engine import assembly

    assembly._Batching._must_wait = property(lambda _: True)


def be_helper(order: Sequence[Any], descriptors: Sequence[int]) -> NoReturn:
    """Become a process as `start_python` starts it."""
    from backend.engine import processes

    _, (module, is_heard, niceness), environment, _ = order
    stderr, connection = descriptors
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(stderr if number == sys.stderr.fileno() and int(is_heard) else nothing, number)
    for number in (stderr, nothing):
        os.close(number)
    processes.die_with_parent(os.getppid())
    os.nice(int(niceness))
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module(module).main(connection)
    sys.exit()


def be_job(order: Sequence[Any], descriptors: Sequence[int]) -> NoReturn:
    """Become the process of `python -m backend.jobs`."""
    from backend.jobs.__main__ import main as run_job

    _, (directory,), environment, _ = order
    for descriptor, number in zip(descriptors, (2, 0, 1), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    Path("/proc/self/comm").write_text(JOB_NAME)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    code = run_job()
    logging.shutdown()
    os._exit(code)


def fork_nursery(descriptors: Sequence[int]) -> socket.socket:
    """Leave a copy of this process as it is, and return the connection for orders to it."""
    orders, theirs = connection()
    if os.fork() == 0:
        orders.close()
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            serve(theirs)
        os._exit(0)
    theirs.close()
    return orders


PROGRAMS = {"helper": be_helper, "job": be_job}


def main() -> None:
    """Import the modules of engines, then fork a process for each order."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:0] = [str(ROOT), SUPPORT]
    # Found only now.
    from backend.model.checkpoint.upstream import index_transformers
    from common.directories import state_directory

    index_transformers(state_directory(os.environ))
    for name in MODULES:
        importlib.import_module(name)
    sys.path.remove(SUPPORT)
    gc.collect()
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork takes one thread along"
    serve(orders)


def serve(orders: socket.socket) -> None:
    """Fork a process for each order."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, LIMIT_BYTES, 8)
        if not text:
            return
        order = json.loads(text)
        begun, beginning = os.pipe()
        process_id = fork_sibling()
        if process_id == 0:
            orders.close()
            os.close(begun)
            program, _, _, inherited = order
            if program in PROGRAMS:
                os.close(beginning)
                PROGRAMS[program](order, descriptors)
            if inherited:
                os.setpgid(0, 0)
            os.close(beginning)
            be_rank(order, descriptors)
        # Whoever starts a process may end its group at once.
        os.close(beginning)
        os.read(begun, 1)
        os.close(begun)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(process_id).encode())


if __name__ == "__main__":
    main()
