"""Options shared by several commands."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from backend.config import ServerConfig
from common.address import AddressError, completed

DEFAULT_ADDRESS = ServerConfig().address

Command = TypeVar("Command", bound=Callable[..., Any])


class AddressType(click.ParamType[str]):
    """`HOST:PORT`, `HOST` with our port, `unix:PATH`; anything else is explained."""

    name = "address"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the whole address."""
        try:
            return completed(value)
        except AddressError as error:
            self.fail(f"{value!r}: {error.problem}", param, ctx)


def address_option_with_help(help_text: str | None = None) -> Callable[[Command], Command]:
    """Return the option `--addr`, the parameter `address` of the command."""
    return click.option(
        "--addr",
        "address",
        type=AddressType(),
        default=DEFAULT_ADDRESS,
        show_default=True,
        metavar="HOST[:PORT]|unix:PATH",
        help=help_text,
    )


address_option = address_option_with_help()
token_option = click.option(
    "--token",
    default="",
    envvar="LOCALAI_GRPC_AUTH_TOKEN",
    help="Bearer token of the backend.  [env: LOCALAI_GRPC_AUTH_TOKEN]",
)
