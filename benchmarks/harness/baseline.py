"""The client side of baseline processes that compute next to the server."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness.models import ROOT, AnyModel
from benchmarks.harness.workload import Speed, Workload

QUIET = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


class BaselineError(Exception):
    """The raw process ended; its messages are on standard error."""


class Baseline:
    """A process with a loaded model that computes only on request."""

    def __init__(self, model: AnyModel, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.raw", model.directory],
            cwd=ROOT,
            env={**environment, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def run(self, workload: Workload) -> Speed:
        """Generate a workload, and return its speed.

        Raises:
            BaselineError: The process is gone.
        """
        _ = self.threads  # its first answer
        if (stdin := self._process.stdin) is None:
            raise BaselineError("the raw process has no pipes")
        stdin.write(workload.to_json() + "\n")
        stdin.flush()
        return Speed(**self._answer())

    @cached_property
    def threads(self) -> int:
        """The number for matrix products that it has found to be the best."""
        return int(self._answer())

    def _answer(self) -> Any:  # noqa: ANN401 (JSON)
        if (stdout := self._process.stdout) is None:
            raise BaselineError("the raw process has no pipes")
        if not (line := stdout.readline()):
            raise BaselineError(f"raw mlx-lm exited with code {self._process.wait()}")
        return json.loads(line)


def answer_of(
    module: str, question: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a module once: a JSON object goes in, another comes back.

    Raises:
        CalledProcessError: It failed; its messages are on standard error.
    """
    answer = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**environment, **QUIET},
        input=json.dumps(question),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment of a process; this one's if the system hides it.

    `run.sh` preloads a BLAS on Linux, and the raw process must run with the same one.
    """
    path = Path(f"/proc/{pid}/environ")
    if not path.exists():
        return dict(os.environ)
    entries = path.read_bytes().decode(errors="surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
