import pytest

from backend.cpu import products


@pytest.fixture
def openblas(monkeypatch):
    """The products stay those of the reference BLAS, which differ in rounding only."""
    monkeypatch.setattr(products, "has_openblas", lambda: True)
