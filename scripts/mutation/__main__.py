"""Puts small faults into the core, one at a time, and lists those that no test noticed.

    build/mutation/venv/bin/python -m scripts.mutation --count 20 engine/rows

Works on copies of the checkout below `build/mutation`. It runs in cosmic-ray's environment, the
tests in the project's.
"""

import difflib
import os
import shlex
import shutil
import subprocess
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

from scripts.mutation.faults import Fault, sample

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutation"
TABLE = Path(__file__).with_name("tests.toml")
# In addition to git's files: generated in a checkout.
GENERATED = "backend/pb"
PRECOMPILED = ("backend", "common", "tests", "scripts", "benchmarks")
PYTEST = (
    "-m pytest -q -x -n0 -p no:cacheprovider --tb=no --no-header --hypothesis-profile=quick "
    "--timeout=120"
)
# How much longer than without a fault the tests may take.
PATIENCE = 3.0
PATIENCE_S = 15.0
BASELINE_TIMEOUT_S = 600.0


class BaselineError(click.ClickException):
    """Tests fail without a fault, so that they show nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a fault.

    Attributes:
        change: The lines before and after.
        killer: The test that noticed it, or a timeout; empty for a survivor.
    """

    fault: Fault
    change: str
    killer: str
    seconds: float


class Tests:
    """The tests that should notice faults of modules; the longest matching path counts."""

    def __init__(self, python: Path, table: Mapping[str, Sequence[str]]) -> None:
        self._python = python
        self._table = table
        self._limits_s: dict[str, float] = {}

    def paths(self, package: str) -> list[Path]:
        """Return the modules of a package, or the module, with tests in the table."""
        place = ROOT / "backend" / package
        found = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        known = [path.relative_to(ROOT) for path in found if path.name != "__init__.py"]
        return [path for path in known if self._names(path)]

    def command(self, path: Path, tree: Path) -> str:
        """Return the command for a module's tests in a tree."""
        files = " ".join(f"tests/{name}" for name in self._names(path))
        inner = f"cd {tree} && PYTHONPATH={tree} exec {self._python} {PYTEST} {files}"
        return f"sh -c {shlex.quote(inner)}"

    def limit_s(self, path: Path, tree: Path) -> float:
        """Return the time limit of a module's tests: a multiple of their time without a fault."""
        names = " ".join(self._names(path))
        if names not in self._limits_s:
            started = time.monotonic()
            outcome, output = run_tests(self.command(path, tree), BASELINE_TIMEOUT_S)
            if outcome is not TestOutcome.SURVIVED:
                raise BaselineError(f"{names}: fails without a fault\n{output}")
            self._limits_s[names] = PATIENCE * (time.monotonic() - started) + PATIENCE_S
        return self._limits_s[names]

    def _names(self, path: Path) -> Sequence[str]:
        keys = [path.relative_to("backend").with_suffix("").as_posix()]
        keys += [each.as_posix() for each in Path(keys[0]).parents]
        return next((self._table[key] for key in keys if key in self._table), ())


def make_tree(number: int) -> Path:
    """Copy the checkout as it is, and compile it so that a changed file is always noticed."""
    tree = WORK / f"tree{number}"
    shutil.rmtree(tree, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT)  # noqa: S603
    generated = [path.relative_to(ROOT) for path in (ROOT / GENERATED).glob("*_pb2*")]
    for name in [*map(Path, filter(None, listed.decode().split("\0"))), *generated]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


def compile_tree(tree: Path, python: Path) -> None:
    """Compile a tree by content, because file times are too coarse for quick changes."""
    command = [python, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*command, *PRECOMPILED], cwd=tree, check=True)  # noqa: S603


def judge(fault: Fault, tests: Tests, tree: Path) -> Verdict:
    """Make a fault in a tree, and run the tests that should notice it."""
    limit_s = tests.limit_s(fault.path, tree)
    started = time.monotonic()
    with fault.made(tree) as (before, after):
        outcome, output = run_tests(tests.command(fault.path, tree), limit_s)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    change = "\n".join(list(lines)[3:])
    killer = "" if outcome is TestOutcome.SURVIVED else _killer(output)
    return Verdict(fault, change, killer, time.monotonic() - started)


def _killer(output: str) -> str:
    named = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[0] if named else output.strip().splitlines()[-1] if output.strip() else "a crash"


def judged(faults: Sequence[Fault], tests: Tests, trees: Sequence[Path]) -> Iterator[Verdict]:
    """Judge faults, one in each tree at a time, and yield the results in order."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def take_turn(fault: Fault) -> Verdict:
        tree = free.get()
        try:
            return judge(fault, tests, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from pool.map(take_turn, faults)


def show(verdict: Verdict) -> None:
    """Print the result of a fault: a survivor with its lines."""
    fault = verdict.fault
    head = f"{fault.path}:{fault.line} {fault.operator} ({verdict.seconds:.0f} s)"
    click.echo(f"{'killed' if verdict.killer else 'SURVIVED'}  {head}")
    click.echo(f"    {verdict.killer}" if verdict.killer else verdict.change)


def summarise(by_package: Mapping[str, Sequence[Verdict]]) -> None:
    """Print the share of killed faults by package, as a Markdown table."""
    click.echo("\n| package | faults tried | noticed | share |\n|---|---|---|---|")
    for package, verdicts in by_package.items():
        killed = sum(bool(verdict.killer) for verdict in verdicts)
        share = f"{killed / len(verdicts):.0%}"
        click.echo(f"| `{package}` | {len(verdicts)} | {killed} | {share} |")


@click.command()
@click.argument("packages", nargs=-1)
@click.option("--count", default=20, show_default=True, help="Faults for each package.")
@click.option("--seed", default=0, show_default=True, help="Of the choice.")
@click.option("--jobs", default=2, show_default=True, help="Faults tried at once.")
@click.option("--python", type=Path, default=ROOT / ".venv/bin/python", help="The project's.")
def main(packages: Sequence[str], *, count: int, seed: int, jobs: int, python: Path) -> None:
    """Try faults in PACKAGES, or modules, below backend (all of the table by default)."""
    os.chdir(ROOT)
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    tests = Tests(python.absolute(), table["tests"])
    chosen = {
        package: sample(ROOT, tests.paths(package), count, seed)
        for package in packages or table["packages"]
    }
    trees = [make_tree(number) for number in range(jobs)]
    for tree in trees:
        compile_tree(tree, python.absolute())
    by_package = defaultdict(list)
    for package, faults in chosen.items():
        for verdict in judged(faults, tests, trees):
            by_package[package].append(verdict)
            show(verdict)
    summarise(by_package)


if __name__ == "__main__":
    main()
