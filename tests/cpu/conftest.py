import mlx.core as mx
import pytest

from backend.cpu import products
from backend.cpu.tokenwise import UPSTREAM


@pytest.fixture(autouse=True)
def functions_of_mlx():
    """Those of other tests stay MLX's own."""
    yield UPSTREAM
    for name in list(UPSTREAM):
        setattr(mx.fast, name, UPSTREAM.pop(name))


@pytest.fixture
def openblas(monkeypatch):
    """The products stay those of the reference BLAS, which differ in rounding only."""
    monkeypatch.setattr(products, "has_openblas", lambda: True)


@pytest.fixture
def any_size(monkeypatch):
    """However few weights there are, they are worth a cast."""
    monkeypatch.setattr(products, "FLOAT32_MIN_BYTES", 0)


@pytest.fixture
def set_memory(monkeypatch):
    """Return a function that sets the bytes of memory of this machine."""
    return lambda size: monkeypatch.setattr(products, "memory_bytes", lambda: size)
