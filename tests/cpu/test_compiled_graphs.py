"""Libraries that MLX compiles at run time: a damaged one is removed before it ends a process."""

import os
import subprocess
import sys
import time

import pytest

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(sys.platform != "linux", reason="libraries have another form elsewhere"),
]

COMPUTE = """
import mlx.core as mx
{first}
print(mx.compile(lambda x: mx.sigmoid(x) * x)(mx.array([1.0])).item())
"""
REMOVE = (
    "from pathlib import Path; from backend.cpu.kernels import remove_damaged_graphs; "
    "remove_damaged_graphs(Path({!r}))"
)
DAMAGES = {
    "empty": lambda _: b"",
    "half of its header": lambda content: content[:32],
    "cut": lambda content: content[: len(content) // 2],
    "zeros at its end": lambda content: content[:4096] + bytes(len(content) - 4096),
    "only zeros": lambda content: bytes(len(content)),
}


def computed(directory, first=""):
    """Compute with a compiled graph in another process, whose libraries are in a directory."""
    return subprocess.run(
        [sys.executable, "-c", COMPUTE.format(first=first)],
        env={**os.environ, "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    directory = tmp_path_factory.mktemp("graphs")
    assert computed(directory).stdout.startswith("0.73")
    (found,) = directory.glob("mlx/*/cpu/*.so")
    return directory, found, found.read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(library, damage):
    directory, file, content = library
    file.write_bytes(DAMAGES[damage](content))
    os.utime(file, (time.time() - 60,) * 2)
    assert computed(directory, REMOVE.format(str(directory))).stdout.startswith("0.73")
    assert len(file.read_bytes()) == len(content)


def test_a_damaged_library_ends_a_process_of_mlx_alone(library):
    directory, file, content = library
    file.write_bytes(DAMAGES["cut"](content))
    assert computed(directory).returncode != 0


def test_a_whole_library_stays(library):
    directory, file, content = library
    file.unlink()
    file.write_bytes(content)
    before = file.stat().st_ino
    assert computed(directory, REMOVE.format(str(directory))).returncode == 0
    assert file.stat().st_ino == before
