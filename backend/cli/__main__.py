"""Run the command line."""

from backend.cli.app import main

main(prog_name="mlx-grpc-backend")
