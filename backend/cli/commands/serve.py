"""`serve`: the counterpart of `run.sh` for an installed wheel."""

import click

from backend.cli.serve import become_server


@click.command(
    "serve",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Serve; `serve --help` lists the arguments. On a Linux CPU it preloads OpenBLAS."""
    become_server(arguments)
