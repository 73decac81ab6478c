"""Libraries that are installed only where media are wanted."""

from collections.abc import Iterator
from contextlib import contextmanager

from backend.errors import UnsupportedError


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Import inside of the block what may be absent.

    Raises:
        UnsupportedError: It is; the message says what to install.
    """
    try:
        yield
    except ImportError:
        problem = f"needs {library}: pip install 'mlx-grpc-backend[{extra}]'"
        raise UnsupportedError(problem) from None
