"""A backend as the host's end-to-end suite starts and ends it."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from backend.cli.server_process import LOOPBACK, free_port

ACCEPT_TIMEOUT_S = 30.0
ORPHAN_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05
# Variables of a shell or another Python, which the host does not have.
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class StartError(Exception):
    """The backend did not accept connections in time, or at all."""


class OrphanError(Exception):
    """A process of the backend outlived the one that the host started."""


class HostedBackend:
    """A running `run.sh`: own process group, no standard input, a foreign working directory.

    Leaving it as a context kills only the direct child, as the host's suite does.
    """

    def __init__(self, run_script: Path, *, orphan_timeout_s: float = ORPHAN_TIMEOUT_S) -> None:
        """Start the script; its processes have a moment to notice that it was killed."""
        self._orphan_timeout_s = orphan_timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="host-suite-")
        self.address = f"{LOOPBACK}:{free_port()}"
        self._log = Path(self._directory.name, "stderr")
        # A shell can close standard input itself, unlike Popen.
        close_input = ("/bin/sh", "-c", 'exec "$@" <&-', "sh")
        with Path(self._directory.name, "stdout").open("ab") as out, self._log.open("ab") as err:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [*close_input, str(run_script), f"--addr={self.address}"],
                cwd=self._directory.name,
                env={
                    name: value
                    for name, value in os.environ.items()
                    if name not in FOREIGN_VARIABLES
                },
                stdout=out,
                stderr=err,
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._directory:
            self._process.kill()
            self._process.wait()
            self._end_orphans()

    def wait_until_accepting(self) -> None:
        """Return as soon as the port accepts connections.

        Raises:
            StartError: It did not within 30 seconds, or the process ended.
        """
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        while not self._accepts():
            if (code := self._process.poll()) is not None:
                raise StartError(f"run.sh ended with code {code}")
            if time.monotonic() > deadline:
                raise StartError(f"no connection within {ACCEPT_TIMEOUT_S:g} s")
            time.sleep(POLL_INTERVAL_S)

    def log_tail(self, lines: int = 20) -> str:
        """Return its last lines of standard error."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _accepts(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _end_orphans(self) -> None:
        """Give processes of the group a moment to notice the end, then kill the rest."""
        deadline = time.monotonic() + self._orphan_timeout_s
        try:
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_INTERVAL_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        raise OrphanError(f"processes of group {self._process.pid} outlived run.sh")
