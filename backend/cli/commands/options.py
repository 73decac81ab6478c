"""Options that several commands share."""

import click

DEFAULT_ADDRESS = "127.0.0.1:50051"

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
