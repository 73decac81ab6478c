"""Start the backend: argv and environment -> `ServerConfig` -> serve until told to stop."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from grpc.aio import ServerInterceptor

from backend.config import MAX_SLOTS, ServerConfig
from backend.engine.engine import Engine
from backend.rpc.server import BackendServer
from common import log as logs
from common.address import AddressError
from common.lifecycle import StopRequest, exit_with_parent, parse_interval

# What hosts call the number of parallel requests; the first that is set counts.
PARALLEL_VARIABLES = ("PYTHON_GRPC_MAX_WORKERS", "LLAMACPP_PARALLEL")
FALSE_WORDS = frozenset({"false", "0", "no", "off"})

TRACE_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = logging.getLogger("backend")


class MissingPackageError(Exception):
    """An optional package that was asked for is not installed."""


def main() -> int:
    """Serve, and return the exit code; a failed start says why in its last line."""
    config = server_config(sys.argv[1:], os.environ)
    logs.configure(config.log_level)
    if config.watches_parent:
        exit_with_parent(config.parent_watch_interval_s)
    try:
        asyncio.run(serve(config))
    except (AddressError, MissingPackageError) as error:
        log.critical("%s", error)
        return 1
    return 0


async def serve(config: ServerConfig) -> None:
    """Serve until a signal, then let what runs finish.

    Raises:
        AddressError: The server cannot listen where it was told to.
        MissingPackageError: Something that was asked for is not installed.
    """
    stop_request = StopRequest()
    stop_request.listen()
    engine = Engine()
    with _metrics_served(config.metrics_address, engine):
        server = BackendServer(config, engine, _tracing() if config.traces else ())
        port = await server.start()
        log.info("listening on %s:%d", config.address.rpartition(":")[0], port)
        await stop_request.wait()
        await server.stop()
    log.info("stopped")
    if engine.is_computing:
        # MLX aborts a process that ends while another thread of it computes.
        logging.shutdown()
        os._exit(0)


@contextmanager
def _metrics_served(address: str, engine: Engine) -> Iterator[None]:
    """Let Prometheus scrape the engine, if there is an address for it."""
    if not address:
        yield
        return
    try:
        from backend.metrics import MetricsServer
    except ImportError as error:
        raise MissingPackageError(
            f"--metrics-addr: {error}; install the extra: pip install 'mlx-grpc-backend[metrics]'"
        ) from None
    with MetricsServer(address, engine) as server:
        log.info("metrics on %s:%d", address.rpartition(":")[0], server.port)
        yield


def _tracing() -> Sequence[ServerInterceptor]:
    try:
        from backend.rpc.tracing import otlp_provider, tracing_interceptors
    except ImportError as error:
        hint = "pip install 'mlx-grpc-backend[tracing]'"
        log.warning("the environment asks for traces, but %s; %s brings them", error, hint)
        return ()
    return tracing_interceptors(otlp_provider())


def server_config(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerConfig:
    """Return what the command line and the environment ask for; hosts add arguments of theirs."""
    defaults = ServerConfig()
    parser = argparse.ArgumentParser(prog="run.sh", allow_abbrev=False, description=__doc__)
    parser.add_argument("--addr", default=defaults.address, metavar="HOST:PORT")
    parser.add_argument("--metrics-addr", default=defaults.metrics_address, metavar="HOST:PORT")
    known, _ = parser.parse_known_args(arguments)
    watch = environment.get("LOCALAI_BACKEND_PARENT_WATCH", "")
    interval = environment.get("LOCALAI_BACKEND_PARENT_WATCH_INTERVAL", "")
    return ServerConfig(
        address=known.addr,
        metrics_address=known.metrics_addr,
        traces=any(environment.get(name) for name in TRACE_ENDPOINTS),
        max_slots=_max_slots(environment, defaults.max_slots),
        auth_token=environment.get("LOCALAI_GRPC_AUTH_TOKEN", ""),
        watches_parent=watch.strip().lower() not in FALSE_WORDS,
        parent_watch_interval_s=_interval_s(interval, defaults.parent_watch_interval_s),
        log_level=logs.level_of(environment),
    )


def _max_slots(environment: Mapping[str, str], default: int) -> int:
    """Return how many requests the host would have run at once, if it says so."""
    name = next((name for name in PARALLEL_VARIABLES if environment.get(name)), None)
    if name is None:
        return default
    text = environment[name].strip()
    if text.isdecimal() and 1 <= int(text) <= MAX_SLOTS:
        return int(text)
    log.warning("%s: %r is no number from 1 to %d; taking %d", name, text, MAX_SLOTS, default)
    return default


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
