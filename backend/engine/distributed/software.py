"""What has to be the same on all ranks, for they have to draw the same tokens."""

from common.versions import versions_of

_PACKAGES = ("mlx-grpc-backend", "mlx", "mlx-lm")


def software() -> str:
    """Return the versions that this process runs with."""
    return versions_of(_PACKAGES)
