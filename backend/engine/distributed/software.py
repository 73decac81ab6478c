"""The versions that must be equal on all ranks, because they must draw the same tokens."""

from common.versions import versions_of

_PACKAGES = ("mlx-grpc-backend", "mlx", "mlx-lm")


def software() -> str:
    """Return the versions in this process."""
    return versions_of(_PACKAGES)
