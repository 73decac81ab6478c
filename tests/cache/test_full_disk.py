"""A disk with room for a few nodes only, mounted for one process."""

import json
import subprocess
import sys

import full_disk
import pytest

pytestmark = pytest.mark.mlx

DISK_BYTES = 2**18


def held_after(small_disk, directory, *tokens):
    """The numbers of the nodes held in the end, of those that were written."""
    command = [sys.executable, full_disk.__file__, str(directory), *map(str, tokens)]
    written = subprocess.run(
        [*small_disk(DISK_BYTES), *command], capture_output=True, text=True, check=False
    )
    assert written.returncode == 0, written.stderr
    return json.loads(written.stdout)


def test_on_a_full_disk_new_nodes_take_the_place_of_the_oldest(small_disk, tmp_path):
    held = held_after(small_disk, tmp_path, *[64] * 20)
    assert 19 in held
    assert 0 not in held
    assert len(held) >= 3


def test_all_others_make_room_for_a_node_of_more_than_half_a_full_disk(small_disk, tmp_path):
    assert 20 in held_after(small_disk, tmp_path, *[64] * 20, 320)
