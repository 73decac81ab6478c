"""A disk with room for a few nodes only, mounted for one process."""

import json
import subprocess
import sys

import full_disk
import pytest

from benchmarks.soak_host import on_small_disk

pytestmark = pytest.mark.mlx

DISK_BYTES = 2**18


@pytest.fixture
def small_disk(tmp_path):
    """The words that run a command with a small disk in `tmp_path`."""
    try:
        return on_small_disk(tmp_path, DISK_BYTES)
    except OSError as error:
        pytest.skip(f"this system does not let users mount: {error}")


def test_on_a_full_disk_new_nodes_take_the_place_of_the_oldest(small_disk, tmp_path):
    command = [sys.executable, full_disk.__file__, str(tmp_path)]
    written = subprocess.run([*small_disk, *command], capture_output=True, text=True, check=False)
    assert written.returncode == 0, written.stderr
    held = json.loads(written.stdout)
    newest = full_disk.NODES - 1
    assert newest in held
    assert 0 not in held
    assert len(held) >= 3
