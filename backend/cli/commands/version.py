"""`version`: what to write into a report of a fault."""

import platform

import click

from common.versions import version_of

# The backend first, then the libraries whose versions decide what works.
_PACKAGES = ("mlx-grpc-backend", "mlx", "mlx-lm", "mlx-vlm", "transformers", "grpcio")


@click.command("version")
def command() -> None:
    """Print the versions of the backend, its libraries and Python."""
    rows = [(name, version_of(name) or "not installed") for name in _PACKAGES]
    rows += [("python", platform.python_version()), ("system", platform.platform())]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")
