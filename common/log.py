"""One logging setup for the process: to stderr, a record per line."""

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

CHATTY_LIBRARIES = (
    "asyncio",
    "filelock",
    "fsspec",
    "grpc",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "transformers",
    "urllib3",
)


class OneLineFormatter(logging.Formatter):
    """Keeps a record, its traceback included, on one line: hosts read logs line by line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, its line breaks escaped."""
        return "\\n".join(super().format(record).splitlines())


def level_of(environment: Mapping[str, str], default: str = "info") -> str:
    """Return the level that the environment asks for."""
    names = ("MLX_BACKEND_LOG_LEVEL", "LOCALAI_LOG_LEVEL")
    return next(filter(None, map(environment.get, names)), default)


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send every record, and Python's warnings, to one stream; replaces an earlier setup.

    Args:
        level: A name of `LEVELS`; any other is taken for `info`.
        stream: `None` is stderr.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(OneLineFormatter())
    logging.basicConfig(
        level=LEVELS.get(level.lower(), logging.INFO), handlers=[handler], force=True
    )
    logging.captureWarnings(capture=True)
    for name in CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
