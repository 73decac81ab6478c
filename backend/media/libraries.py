"""Optional libraries for media."""

from collections.abc import Iterator
from contextlib import contextmanager

from backend.errors import UnsupportedError


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Import optional libraries inside this block.

    Raises:
        UnsupportedError: One is not installed; the message says how to install it.
    """
    try:
        yield
    except ImportError:
        problem = f"needs {library}: pip install 'mlx-grpc-backend[{extra}]'"
        raise UnsupportedError(problem) from None
