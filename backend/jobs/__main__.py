"""`python -m backend.jobs`: run the job described by the first line of standard input.

Progress goes to standard output, one line of JSON each; everything else goes to standard
error. The end of standard input ends the process.
"""

import io
import logging
import os
import re
import sys
import threading
from io import FileIO

import msgspec

from backend.errors import BackendError
from backend.jobs.job import (
    FAILED,
    SAVE_AND_STOP,
    Export,
    FineTuning,
    Job,
    Progress,
    Quantization,
    Report,
)
from backend.jobs.scratch import remove_all
from common import log as logs
from common.directories import state_directory

_LOWEST_PRIORITY = 19
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The levels that mlx-lm writes before some lines.
_LEVELS = {"INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}

log = logging.getLogger("backend.jobs")


class Printed(io.TextIOBase):
    """The printed output of libraries, as lines of the log: tables and bars for level `debug`."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        """Log the lines that are whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            level, _, message = _STYLES.sub("", line).strip().removeprefix("[").partition("] ")
            if level in _LEVELS:
                log.log(_LEVELS[level], "%s", message)
            else:
                log.debug("%s", line)
        return len(text)

    def close(self) -> None:
        """Log the last line, which may lack its end."""
        if self._rest:
            self.write("\n")
        super().close()


def main() -> int:
    """Run one job; return the exit code."""
    logs.configure(logs.level_of(os.environ))
    os.nice(_LOWEST_PRIORITY)
    os.environ["NO_COLOR"] = "1"
    # Libraries print to stdout; the pipe must carry progress only.
    progress = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.stdout = Printed()
    # Unbuffered: exit hangs on a buffer's lock while a thread reads.
    commands = os.fdopen(0, "rb", buffering=0)
    line = commands.readline()
    if not line:
        # Stopped before the job was sent.
        return 1
    job = msgspec.json.decode(line, type=Job)
    stopping = threading.Event()
    threading.Thread(target=_listen, args=(commands, stopping), daemon=True).start()

    def report(news: Progress) -> None:
        progress.write(msgspec.json.encode(news.sendable()) + b"\n")

    try:
        report(_run(job, report, stopping))
    except BackendError as error:
        report(Progress(status=FAILED, message=str(error)))
    except Exception as error:
        log.exception("the job failed")
        report(Progress(status=FAILED, message=f"{type(error).__name__}: {error}"))
    return 0


def _run(job: Job, report: Report, stopping: threading.Event) -> Progress:
    from backend.model.checkpoint.upstream import import_mlx_lm, index_transformers

    index_transformers(state_directory(os.environ))
    import_mlx_lm()
    # Imported here, because each one pulls in MLX, transformers and more.
    from backend.cpu.install import install

    install()
    match job:
        case Quantization():
            from backend.jobs.quantization import quantize

            return quantize(job, report)
        case FineTuning():
            from backend.jobs.finetuning import fine_tune

            return fine_tune(job, report, stopping)
        case Export():
            from backend.jobs.quantization import export

            return export(job, report)


def _listen(commands: FileIO, stopping: threading.Event) -> None:
    while line := commands.readline():
        if line == SAVE_AND_STOP:
            stopping.set()
    remove_all()
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.close()
    logging.shutdown()
    # At once: the final progress means that the process is gone.
    os._exit(code)
