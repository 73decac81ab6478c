"""Starts the backend with the command line and the environment, and serves until stopped."""

import signal

# All other imports take a second, in which an interrupt would leave a traceback.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from grpc.aio import ServerInterceptor

from backend.config import MAX_SLOTS, SWITCH_INTERVAL_S, ServerConfig
from backend.rpc.server import BackendServer
from common import log as logs
from common.address import AddressError, removal, socket_path, split_address
from common.directories import state_directory, temporary_directory
from common.machine_memory import LASTING, share_heaps
from common.openblas import suited_kernels
from common.options import ADDRESS_SYNONYMS, described, unknown_options
from common.process import (
    StopRequest,
    before_abrupt_end,
    exit_with_parent,
    for_children,
    in_own_thread,
    keep_standard_descriptors,
    parse_interval,
    withhold_secrets,
)
from common.rpc import fits_header

if TYPE_CHECKING:
    from backend.engine.engine import Engine
    from backend.pipeline.served_model import ServedModel
    from backend.rpc.services import Services

# Hosts' variables for the number of parallel requests; the first one set counts.
PARALLEL_VARIABLES = ("PYTHON_GRPC_MAX_WORKERS", "LLAMACPP_PARALLEL")
# Set by run.sh before anything else.
PARENT_VARIABLE = "MLX_BACKEND_PARENT"
# glibc's own.
HEAPS_VARIABLE = "MALLOC_ARENA_MAX"
# That every call must send.
AUTH_VARIABLE = "LOCALAI_GRPC_AUTH_TOKEN"
# Hides advice of transformers.
ADVICE_VARIABLE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
# `serve` of the command line explains its own options.
PROGRAM = "run.sh"
DESCRIPTION = (
    "Serve MLX models by gRPC until SIGTERM or SIGINT; see docs/reference/options.md for variables."
)
OPTIONS = ("--addr", "--model", "--metrics-addr", "--dashboard", "--help")
# A directory for the ledger of the machine's memory.
LEDGER_VARIABLE = "MLX_BACKEND_LEDGER"
# The file of findings of models, or 0 for none.
FINDINGS_VARIABLE = "MLX_BACKEND_FINDINGS"
FINDINGS_NAME = "findings.json"
FALSE_WORDS = frozenset({"false", "0", "no", "off"})

# No engine process could load the model again, or the server accepts no calls.
EXIT_BROKEN = 3

TRACE_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Listener = TypeVar("Listener")

log = logging.getLogger("backend")


class SettingError(Exception):
    """An option or a variable cannot be used; the message begins with its name."""


def main() -> int:
    """Serve, and return the exit code; the last line of a failed start gives the reason."""
    keep_standard_descriptors()
    if HEAPS_VARIABLE not in os.environ:
        share_heaps()
    if not logs.configure_as_named(os.environ):
        return 1
    # That of the missing PyTorch, which nothing here needs; child processes inherit it.
    os.environ.setdefault(ADVICE_VARIABLE, "1")
    for name, value in suited_kernels().items():
        os.environ.setdefault(name, value)
    _use_own_temporary_directory(os.environ)
    try:
        config = server_config(sys.argv[1:], os.environ)
    except SettingError as error:
        log.critical("%s", error)
        return 1
    # Not for child processes: they have another parent, and no need for secrets.
    os.environ.pop(PARENT_VARIABLE, None)
    secrets = withhold_secrets(os.environ)
    if secrets:
        log.info("kept from child processes: %s", ", ".join(sorted(secrets)))
    if config.watches_parent:
        exit_with_parent(config.parent_watch_interval_s, config.parent)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return asyncio.run(serve(config, secrets))
    except (AddressError, SettingError) as error:
        log.critical("%s", error)
        return 1


async def serve(config: ServerConfig, secrets: Mapping[str, str]) -> int:
    """Serve until a signal, or until nothing can be served any more; then let requests finish.

    Args:
        config: Of the process.
        secrets: Variables that only the download of a model gets.

    Returns:
        The exit code.

    Raises:
        AddressError: The server cannot listen at its address.
        SettingError: A requested extra is not installed.
    """
    stop_request = StopRequest()
    stop_request.listen()
    server = BackendServer(config, _tracing() if config.traces else ())
    bound = await server.start()
    log.info("listening on %s", bound)
    if socket_path(bound):
        before_abrupt_end(removal(bound))
    with ExitStack() as others:
        try:
            # Importing takes longer than all before; `Health` is answered meanwhile.
            engine, services = await in_own_thread(_engine_and_services, config, secrets)
            server.serve(services)
            others.enter_context(_metrics_served(config.metrics_address, engine))
            others.enter_context(_page_served(config, engine))
            engine.prepare()
            LASTING.leave_out_at_once()
            code = await _exit_code(
                [
                    (stop_request.wait(), 0),
                    (_model_failed(config, bound), 1),
                    (engine.wait_until_broken(), EXIT_BROKEN),
                    (server.deaf.wait(), EXIT_BROKEN),
                ]
            )
        finally:
            await server.stop()
    log.info("stopped")
    return code


def _engine_and_services(
    config: ServerConfig, secrets: Mapping[str, str]
) -> tuple["Engine[ServedModel]", "Services"]:
    from backend.engine.engine import Engine
    from backend.model.checkpoint.hub import locate
    from backend.model.checkpoint.upstream import index_transformers
    from backend.pipeline.served_model import ServedModel
    from backend.rpc.services import Services

    index_transformers(state_directory(os.environ))
    download_environment = {**os.environ, **secrets}
    engine = Engine(
        serve=ServedModel.of,
        locate=partial(locate, environment=download_environment),
        environment=for_children(os.environ),
        memory_ledger=memory_ledger(os.environ),
        findings=findings_file(os.environ),
    )
    return engine, Services(config, engine, download_environment)


async def _exit_code(ends: Sequence[tuple[Coroutine[object, None, object], int]]) -> int:
    """Wait for the first of several ends, and return its exit code."""
    codes = {asyncio.create_task(end): code for end, code in ends}
    await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
    code = next(code for task, code in codes.items() if task.done())
    for task in codes:
        task.cancel()
    if code == EXIT_BROKEN:
        log.critical(
            "nothing can be served: ending with code %d, so that the host starts another", code
        )
    return code


async def _model_failed(config: ServerConfig, address: str) -> None:
    """Load the model of the command line; return if that fails, and never otherwise."""
    if config.model:
        from backend.rpc.server import load

        if not await load(address, config.model, config.auth_token):
            return
    await asyncio.Event().wait()


@contextmanager
def _metrics_served(address: str, engine: "Engine[ServedModel]") -> Iterator[None]:
    """Serve metrics of the engine, if there is an address for them."""
    if not address:
        yield
        return
    try:
        from backend.rpc.metrics import MetricsServer
    except ImportError as error:
        from common.remedies import install_command

        raise SettingError(
            f"--metrics-addr: {error}; this adds it: {install_command('metrics')}"
        ) from None
    with _listening("--metrics-addr", partial(MetricsServer, address, engine)) as server:
        log.info("metrics on %s:%d", address.rpartition(":")[0], server.port)
        yield


@contextmanager
def _page_served(config: ServerConfig, engine: "Engine[ServedModel]") -> Iterator[None]:
    """Serve the dashboard of the engine, if there is an address for it."""
    if not config.dashboard_address:
        yield
        return
    from backend.rpc.page import PageServer

    page = partial(PageServer, config.dashboard_address, engine, config.auth_token)
    with _listening("--dashboard", page) as server:
        log.info("dashboard on %s", server.url)
        yield


def _listening(option: str, create: Callable[[], Listener]) -> Listener:
    """Return the server that listens at the address of an option."""
    try:
        return create()
    except AddressError as error:
        raise SettingError(f"{option}: {error}") from None


def _tracing() -> Sequence[ServerInterceptor]:
    try:
        from backend.rpc.tracing import otlp_provider, tracing_interceptors
    except ImportError as error:
        from common.remedies import install_command

        hint = install_command("tracing")
        log.warning("the environment asks for traces, but %s; this adds them: %s", error, hint)
        return ()
    return tracing_interceptors(otlp_provider())


def server_config(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerConfig:
    """Return the configuration of command line and environment; hosts add own arguments.

    Raises:
        SettingError: An address or the token can be none.
    """
    defaults = ServerConfig()
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, description=DESCRIPTION)
    parser.add_argument("--addr", default=defaults.address, metavar="HOST:PORT|unix:PATH")
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--metrics-addr", default=defaults.metrics_address, metavar="HOST:PORT")
    parser.add_argument("--dashboard", default=defaults.dashboard_address, metavar="[HOST:]PORT")
    known, others = parser.parse_known_args(arguments)
    _warn_of_unknown(others)
    watch = environment.get("LOCALAI_BACKEND_PARENT_WATCH", "")
    parent = environment.get(PARENT_VARIABLE, "")
    interval = environment.get("LOCALAI_BACKEND_PARENT_WATCH_INTERVAL", "")
    return ServerConfig(
        address=known.addr,
        metrics_address=_possible("--metrics-addr", known.metrics_addr),
        dashboard_address=_possible("--dashboard", _on_loopback(known.dashboard)),
        model=known.model,
        traces=any(environment.get(name) for name in TRACE_ENDPOINTS),
        max_slots=_max_slots(environment, defaults.max_slots),
        auth_token=_auth_token(environment),
        parent=int(parent) if parent.isdecimal() else None,
        watches_parent=watch.strip().lower() not in FALSE_WORDS,
        parent_watch_interval_s=_interval_s(interval, defaults.parent_watch_interval_s),
    )


def _possible(option: str, address: str) -> str:
    """Return an address if it can be one: that is told at once, not after all imports."""
    try:
        if address:
            split_address(address)
    except AddressError as error:
        raise SettingError(f"{option}: {error}") from None
    return address


def _auth_token(environment: Mapping[str, str]) -> str:
    token = environment.get(AUTH_VARIABLE, "")
    if not fits_header(token):
        problem = "no caller can send it: headers hold printable ASCII characters only"
        raise SettingError(f"{AUTH_VARIABLE}: {problem}")
    return token


def _on_loopback(address: str) -> str:
    """Return an address, on loopback if it is only a port."""
    return f"127.0.0.1:{address}" if address.isdecimal() else address


def _warn_of_unknown(arguments: Sequence[str]) -> None:
    """Log unknown options: hosts add their own, and people misspell."""
    if names := unknown_options(arguments):
        log.warning("ignoring unknown options: %s", described(names, OPTIONS, ADDRESS_SYNONYMS))


def _max_slots(environment: Mapping[str, str], default: int) -> int:
    """Return the number of concurrent requests set by the host, or the default."""
    name = next((name for name in PARALLEL_VARIABLES if environment.get(name)), None)
    if name is None:
        return default
    text = environment[name].strip()
    if text.isdecimal() and 1 <= int(text) <= MAX_SLOTS:
        return int(text)
    log.warning("%s: %r is not a number from 1 to %d; taking %d", name, text, MAX_SLOTS, default)
    return default


def _use_own_temporary_directory(environment: MutableMapping[str, str]) -> None:
    """Have this process and all its children write temporary files where nobody else can."""
    try:
        directory = temporary_directory(state_directory(environment))
    except OSError as error:
        log.warning("the temporary directory may be open to other users: %s", error)
    else:
        environment["TMPDIR"] = str(directory)


def memory_ledger(environment: Mapping[str, str]) -> Path:
    """Return the directory in which this user's backends on this machine share its memory.

    A home may be on a network, so the directory has the machine's name.
    """
    machine = re.sub(r"[^\w.-]", "_", platform.node()) or "machine"
    return (
        _told_path(environment, LEDGER_VARIABLE)
        or state_directory(environment) / f"memory-{machine}"
    )


def findings_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file of findings of models; `None` for none."""
    if environment.get(FINDINGS_VARIABLE, "").lower() in FALSE_WORDS:
        return None
    told = _told_path(environment, FINDINGS_VARIABLE)
    return told or state_directory(environment) / FINDINGS_NAME


def _told_path(environment: Mapping[str, str], name: str) -> Path | None:
    told = environment.get(name, "")
    if Path(told).is_absolute():
        return Path(told)
    if told:
        log.warning("%s: %r is not an absolute path; ignored", name, told)
    return None


def _interval_s(text: str, default: float) -> float:
    if not text:
        return default
    try:
        return parse_interval(text)
    except ValueError as error:
        log.warning("LOCALAI_BACKEND_PARENT_WATCH_INTERVAL: %s; taking %g s", error, default)
        return default


if __name__ == "__main__":
    sys.exit(main())
