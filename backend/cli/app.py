"""The command line. Commands are imported when they are called or described."""

import errno
import importlib
import math
import sys
from difflib import get_close_matches
from io import BytesIO, TextIOWrapper

import click

# Each name with the module below `backend.cli` and the variable that has its command.
_COMMANDS = {
    "serve": "server_process:command",
    "chat": "chat:command",
    "status": "status:command",
    "cache": "cache:command",
    "bench": "bench:command",
    "fit": "fit:command",
    "pull": "pull:pull_command",
    "list": "pull:list_models",
    "rank": "server_process:rank",
    "doctor": "doctor:command",
    "demo": "demo:command",
    "replay": "recordings:command",
    "version": "doctor:version",
}


class FiniteRange(click.FloatRange):
    """A number within bounds; NaN, which no bound excludes, and infinities are refused."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number, or fail."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class _LazyGroup(click.Group):
    """Loads a command from its module, and guesses a misspelt one."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, variable = _COMMANDS[name].partition(":")
        found = importlib.import_module(f"backend.cli.{module}")
        command: click.Command = getattr(found, variable)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, _COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}"
            context.fail(f"no command {name!r}: {hint}")
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except OSError as error:
            # click ends quietly where nobody reads its output.
            if error.errno == errno.EPIPE:
                raise
            raise click.ClickException(str(error)) from None
        except ImportError as error:
            if "mlx" not in str(error):
                raise
            # Slow, and Ctrl-C while this module is imported would be a traceback.
            from common.remedies import no_mlx

            raise click.ClickException(no_mlx(error)) from None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-grpc-backend", prog_name="mlx-grpc-backend")
def main() -> None:
    """Serve MLX models over gRPC, chat with them, and watch them."""
    if sys.stdin is None:
        sys.stdin = TextIOWrapper(BytesIO())
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Terminals have other encodings than texts.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
