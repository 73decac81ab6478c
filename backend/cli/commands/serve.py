"""`serve`: the counterpart of `run.sh` for people; it accepts nothing that it does not know."""

from typing import NoReturn

import click

from backend.cli.commands.options import address_option_with_help
from backend.cli.serve import become_rank, become_server
from common.arguments import ADDRESS_SYNONYMS

_WAYS = "Ctrl-C stops it, --model loads a model"


class _Serve(click.Command):
    """Says what a person probably meant who writes another server's options, or a word."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            if hint := ADDRESS_SYNONYMS.get(error.option_name):
                text = f"No such option: {error.option_name} Did you mean {hint}?"
                raise click.UsageError(text, context) from None
            raise


@click.command("serve", cls=_Serve)
@address_option_with_help("Where to listen; port 0 is any free one.")
@click.option("--model", help="Load this at once: a path, a hub id, or demo.")
@click.option("--metrics-addr", metavar="HOST:PORT", help="Where Prometheus reads metrics.")
@click.option("--dashboard", metavar="[HOST:]PORT", help="Where a browser finds the dashboard.")
@click.argument("extra", nargs=-1, metavar="")
def command(*, address: str, extra: tuple[str, ...], **options: str | None) -> NoReturn:
    """Serve until Ctrl-C; with --model, a model is ready at once.

    On a Linux CPU it preloads OpenBLAS.
    """
    if extra:
        raise click.UsageError(f"serve takes options only, not {extra[0]!r}: {_WAYS}")
    named = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    become_server(
        ["--addr", address, *(part for name, value in named if value for part in (name, value))]
    )


@click.command(
    "rank",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def rank(arguments: tuple[str, ...]) -> NoReturn:
    """Compute a part of a model that is divided among machines.

    `rank --help` lists the arguments.
    """
    become_rank(arguments)
