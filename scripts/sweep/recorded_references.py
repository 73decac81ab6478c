"""The libraries' own replies, computed in a process that may crash."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.sweep.families import Family, from_json, to_json
from scripts.sweep.verdict import Expected, Outcome, Verdict

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S, _SLOW_TIMEOUT_S = 300.0, 1200.0
_MAX_CHARS = 200
_REVISION = "0" * 40


class References:
    """Asks a process, which is restarted after a family that ends it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def of(self, family: Family, directory: Path) -> dict[str, Expected] | Verdict:
        """Build a family's checkpoint and return the library's replies, or the reason for none."""
        process = self._process = self._process or _start(self._environment)
        question, reply = process.stdin, process.stdout
        if question is None or reply is None:
            raise RuntimeError("the process has no pipes")
        question.write(json.dumps([family.name, family.sees, str(directory)]) + "\n")
        question.flush()
        limit = _SLOW_TIMEOUT_S if family.is_slow else _TIMEOUT_S
        if not select.select([reply], [], [], limit)[0]:
            self.close()
            return Verdict(
                Outcome.CANNOT_RUN, f"{family.library} takes more than {limit / 60:.0f} minutes"
            )
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


def _start(environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.sweep.recorded_references"],
        cwd=_ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def offer(directory: Path, repository: str) -> None:
    """Put a checkpoint's tokenizer into the hub's cache, as if from a repository."""
    cache = Path(os.environ["HF_HOME"], "hub", f"models--{repository.replace('/', '--')}")
    snapshot = cache / "snapshots" / _REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, snapshot)
    (cache / "refs").mkdir(exist_ok=True)
    (cache / "refs" / "main").write_text(_REVISION, encoding="utf-8")


def _replies(family: Family, directory: Path) -> dict[str, Expected]:
    family.build(directory)
    if family.hub_tokenizer:
        offer(directory, family.hub_tokenizer)
    return family.reference(directory)


def answer() -> None:
    """Answer each line of standard input, until it ends."""
    # Libraries print.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, sees, directory = json.loads(line)
        try:
            replies = to_json(_replies(Family(name, sees=sees), Path(directory)))
            failure = None
        # Upstream's models raise anything, and some exit if a package is missing.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            replies, failure = "{}", " ".join(repr(error).split())[:_MAX_CHARS]
        print(json.dumps([replies, failure]), file=answers, flush=True)


if __name__ == "__main__":
    answer()
