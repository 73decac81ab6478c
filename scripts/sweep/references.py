"""What libraries reply by themselves, computed in a process that may crash."""

import json
import select
import subprocess
import sys
from pathlib import Path

from scripts.sweep.families import Family, from_json, to_json
from scripts.sweep.verdict import Expected, Outcome, Verdict

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 300.0
_MAX_CHARS = 200


class References:
    """Asks one process after another; a family that ends it costs the next family a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def of(self, family: Family, directory: Path) -> dict[str, Expected] | Verdict:
        """Build a family's checkpoint and return the library's replies, or why there are none."""
        process = self._process = self._process or _start()
        question, reply = process.stdin, process.stdout
        if question is None or reply is None:
            raise RuntimeError("the process has no pipes")
        question.write(json.dumps([family.name, family.sees, str(directory)]) + "\n")
        question.flush()
        if not select.select([reply], [], [], _TIMEOUT_S)[0]:
            self.close()
            return Verdict(Outcome.CANNOT_RUN, f"{family.library} takes more than 5 minutes")
        line = reply.readline()
        if not line:
            code = process.wait()
            self.close()
            return Verdict(Outcome.CANNOT_RUN, f"{family.library} ends the process ({code})")
        replies, failure = json.loads(line)
        if failure is not None:
            return Verdict(Outcome.CANNOT_RUN, f"{family.library} by itself: {failure}")
        return from_json(replies)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.sweep.references"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def answer() -> None:
    """Answer each line of standard input, until it ends."""
    # Libraries print.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, sees, directory = json.loads(line)
        try:
            family = Family(name, sees=sees)
            replies = to_json(family.reference(family.build(Path(directory))))
            failure = None
        # Upstream's models raise anything, and some exit where a package is missing.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            replies, failure = "{}", " ".join(repr(error).split())[:_MAX_CHARS]
        print(json.dumps([replies, failure]), file=answers, flush=True)


if __name__ == "__main__":
    answer()
