"""Optional libraries for media."""

from collections.abc import Iterator
from contextlib import contextmanager

from backend.errors import UnsupportedError
from common.remedies import install_command


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Import optional libraries inside this block.

    Raises:
        UnsupportedError: One is not installed; the message says how to install it.
    """
    try:
        yield
    except ImportError:
        raise UnsupportedError(f"needs {library}: {install_command(extra)}") from None
