"""Options shared by several commands."""

import click

from backend.config import ServerConfig

DEFAULT_ADDRESS = ServerConfig().address

address_option = click.option(
    "--addr",
    "address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT|unix:PATH",
)
token_option = click.option(
    "--token",
    default="",
    envvar="LOCALAI_GRPC_AUTH_TOKEN",
    help="Bearer token of the backend.  [env: LOCALAI_GRPC_AUTH_TOKEN]",
)
