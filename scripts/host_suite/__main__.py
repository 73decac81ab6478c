"""Starts `run.sh` as LocalAI's own end-to-end suite does, with the same checks."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from google.protobuf.message import Message

from scripts.host_suite.callers import Caller, CallFailedError, GrpcurlCaller, StubCaller
from scripts.host_suite.capabilities import (
    CAPABILITIES,
    TEXT_CAPABILITIES,
    Capability,
    Subject,
    UnmetError,
)
from scripts.host_suite.hosted import HostedBackend, OrphanError, StartError

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED_MODEL = Path("backend", "demo", "model")


def parse_capabilities(
    context: click.Context, option: click.Parameter, names: str
) -> Sequence[str]:
    """Return the capabilities of a comma-separated list, in the suite's order."""
    asked = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := asked - CAPABILITIES.keys():
        known = ", ".join(CAPABILITIES)
        problem = f"unknown: {', '.join(sorted(unknown))}; there are {known}"
        raise click.BadParameter(problem, context, option)
    return tuple(name for name in CAPABILITIES if name in asked)


@click.command(help=__doc__)
@click.option(
    "--run-sh",
    "run_script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=ROOT / "run.sh",
    help="Another backend's, a package's for instance.",
)
@click.option("--model", default="", help="Directory or hub id; without it the embedded model.")
@click.option(
    "--caps",
    "capabilities",
    callback=parse_capabilities,
    default=",".join(TEXT_CAPABILITIES),
    show_default=True,
    metavar="NAME,...",
    help="What to check; vision there is too.",
)
def main(run_script: Path, model: str, capabilities: Sequence[str]) -> None:
    """Run the suite, and exit with 1 at the first failure."""
    script = run_script.resolve()
    model_path = Path(model).expanduser() if model else script.parent / EMBEDDED_MODEL
    try:
        with (
            tempfile.TemporaryDirectory(prefix="host-suite-") as directory,
            HostedBackend(script) as backend,
        ):
            subject = Subject(
                model=str(model_path.resolve()) if model_path.is_dir() else model,
                capabilities=capabilities,
                directory=Path(directory),
            )
            passed = run(backend, subject)
            if not passed:
                click.echo(f"the backend's log ends:\n{backend.log_tail()}", err=True)
    except OrphanError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(0 if passed else 1)


def run(backend: HostedBackend, subject: Subject) -> bool:
    """Print a line per capability and caller; stop at the first that fails."""
    started = time.monotonic()
    try:
        backend.wait_until_accepting()
    except StartError as error:
        report("run.sh", "start", started, str(error))
        return False
    report("run.sh", "start", started)
    return all(
        passes(caller, name, subject)
        for caller in callers(backend.address)
        for name in subject.capabilities
    )


def callers(address: str) -> Iterator[Caller]:
    """Yield every caller available on this machine."""
    yield StubCaller(address)
    program = shutil.which("grpcurl")
    if program is None:
        click.echo("grpcurl is not on the PATH: its part is left out")
        return
    yield GrpcurlCaller(program, address)
    yield GrpcurlCaller(program, address, proto=ROOT / "backend.proto")


def passes(caller: Caller, name: str, subject: Subject) -> bool:
    """Try one capability, and report it."""
    capability = CAPABILITIES[name]
    started = time.monotonic()
    try:
        capability.check(answers(caller, capability, subject))
    except (CallFailedError, UnmetError) as error:
        report(caller.name, name, started, str(error))
        return False
    report(caller.name, name, started)
    return True


def answers(caller: Caller, capability: Capability, subject: Subject) -> Sequence[Message]:
    """Make the calls of one capability."""
    if capability.opening is not None:
        method, opening = capability.opening
        caller.call(method, opening(subject), capability.timeout_s)
    requests = filter(None, (capability.baseline, capability.request))
    return [
        message
        for request in requests
        for message in caller.call(capability.method, request(subject), capability.timeout_s)
    ]


def report(caller: str, step: str, started: float, problem: str = "") -> None:
    """Print one line."""
    verdict = f"FAILED  {problem}" if problem else "ok"
    click.echo(f"{caller:<24}{step:<12}{time.monotonic() - started:7.2f} s  {verdict}")


if __name__ == "__main__":
    main()
