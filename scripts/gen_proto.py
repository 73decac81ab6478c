"""Generates the gRPC stubs in `backend/pb/` from `backend.proto`; git ignores them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The mapping `backend/pb=.` keeps the proto at the root and gives the stubs absolute imports.
PROTOC_ARGUMENTS = (
    "-Ibackend/pb=.",
    "--python_out=.",
    "--grpc_python_out=.",
    "--pyi_out=.",
    "backend.proto",
)


def generate(root: Path) -> None:
    """Write the stubs below a checkout.

    Raises:
        subprocess.CalledProcessError: The proto is malformed; protoc has printed the reason.
    """
    command = [sys.executable, "-m", "grpc_tools.protoc", *PROTOC_ARGUMENTS]
    subprocess.run(command, cwd=root, check=True)  # noqa: S603 - nothing of it comes from outside


if __name__ == "__main__":
    generate(ROOT)
