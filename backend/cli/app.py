"""The command line. Commands are imported when they are called or described."""

import importlib

import click

_COMMANDS = ("serve", "chat", "status", "cache", "bench", "fit", "doctor", "demo", "replay")


class _LazyGroup(click.Group):
    """Loads the command NAME from the module `backend.cli.commands.NAME`."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"backend.cli.commands.{name}").command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-grpc-backend", prog_name="mlx-grpc-backend")
def main() -> None:
    """Serve MLX models over gRPC, chat with them, and watch them."""
