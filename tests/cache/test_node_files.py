"""Nodes on disk: what is written comes back, and nothing else ever does."""

import random

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from backend.cache.kv import Block, Segment, Snapshot, State, evaluate
from backend.cache.node_directory import NodeDirectory, StoredNode
from backend.cache.node_file import (
    FORMAT_VERSION,
    DamagedFileError,
    read_header,
    read_node,
    write_node,
)
from backend.cache.plain import from_plain, to_plain
from backend.cache.token_key import TokenKey

pytestmark = pytest.mark.mlx


def segment(tokens, *, has_snapshot=False):
    keys = mx.random.normal((1, 2, tokens, 8)).astype(mx.bfloat16)
    block = Block(tokens, ((keys, mx.zeros((1, 1, tokens, 0))), (), (mx.ones((1, tokens, 4)),)))
    state = State((None, mx.arange(6).reshape(1, 2, 3)), (4, 2))
    made = Segment((block,), Snapshot((state,)) if has_snapshot else None)
    evaluate([made])
    return made


def stored(start, stop, *, has_snapshot=False):
    plain = to_plain(segment(stop - start, has_snapshot=has_snapshot))
    return StoredNode(TokenKey.from_ids(range(stop)), start, plain)


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and mx.array_equal(one, other)


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_segment_comes_back_as_it_was(tmp_path, has_snapshot):
    path, key = tmp_path / "node.safetensors", TokenKey.from_ids([-5, 2**40, 3, 4, 5])
    written = segment(3, has_snapshot=has_snapshot)
    write_node(path, "model", key, 2, to_plain(written))
    header, plain = read_node(path, "model")
    read = from_plain(plain)
    assert header == read_header(path, "model")
    assert (header.key, header.start, header.has_snapshot) == (key, 2, has_snapshot)
    for one, other in zip(written.blocks[0].layers, read.blocks[0].layers, strict=True):
        assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    if has_snapshot:
        [before], [after] = written.snapshot.states, read.snapshot.states
        assert after.arrays[0] is None
        assert equal(before.arrays[1], after.arrays[1])
        assert after.numbers == before.numbers


def test_no_bit_of_a_file_may_change(tmp_path):
    path = tmp_path / "node.safetensors"
    node = stored(2, 5, has_snapshot=True)
    write_node(path, "model", node.key, node.start, node.segment)
    content = path.read_bytes()
    rng = random.Random(1)
    for _ in range(400):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            read_node(path, "model")
    for length in range(0, len(content), 17):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFileError):
            read_node(path, "model")


@pytest.mark.parametrize(
    "about",
    [
        '{"start": Infinity, "outline": "{\\"states\\": null}", "arrays": []}',
        '{"start": 0, "outline": "[]", "arrays": {}}',
        '{"start": 0, "outline": 7, "arrays": []}',
        "[" * 100_000,
        "7",
    ],
)
def test_a_header_that_makes_no_sense_is_damage(tmp_path, about):
    path = tmp_path / "node.safetensors"
    metadata = {"format_version": FORMAT_VERSION, "fingerprint": "model", "about": about}
    save_file({"key": np.zeros(2, np.int64)}, path, metadata | {"checksum": ""})
    for read in (read_header, read_node):
        with pytest.raises(DamagedFileError):
            read(path, "model")


def test_a_file_of_another_model_is_not_read(tmp_path):
    path = tmp_path / "node.safetensors"
    node = stored(0, 5)
    write_node(path, "model", node.key, node.start, node.segment)
    with pytest.raises(DamagedFileError, match="another model"):
        read_header(path, "other")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nodes_are_found_in_whatever_order_they_were_written(tmp_path, order):
    nodes = [stored(0, 40), stored(40, 70), stored(70, 100)]
    directory = NodeDirectory(tmp_path, "model", 10**9)
    for i in order:
        directory.write(nodes[i])
    key = TokenKey.from_ids([*range(90), 7, 7])
    for reader in (directory, NodeDirectory(tmp_path, "model", 10**9)):
        read = reader.read(key, 0, ends_at_snapshot=False)
        assert [(node.start, len(node.key)) for node in read] == [(0, 40), (40, 70), (70, 100)]
        known = reader.read(key, 50, ends_at_snapshot=False)
        assert [node.start for node in known] == [40, 70]


def test_nothing_behind_the_last_snapshot_is_read_where_only_snapshots_help(tmp_path):
    directory = NodeDirectory(tmp_path, "model", 10**9)
    for node in (stored(0, 40, has_snapshot=True), stored(40, 70), stored(70, 100)):
        directory.write(node)
    key = TokenKey.from_ids(range(100))
    assert [n.start for n in directory.read(key, 0, ends_at_snapshot=True)] == [0]
    directory.write(stored(40, 70, has_snapshot=True))
    assert [n.start for n in directory.read(key, 0, ends_at_snapshot=True)] == [0, 40]


def test_the_oldest_files_of_all_models_make_room(tmp_path):
    for model in ("one", "other"):
        directory = NodeDirectory(tmp_path, model, 60_000)
        for start in range(0, 1000, 100):
            directory.write(stored(start, start + 100))
    assert not list(tmp_path.glob("one/*"))
    sizes = [path.stat().st_size for path in tmp_path.glob("other/*")]
    assert 30_000 < sum(sizes) <= 75_000


def test_what_a_killed_writer_leaves_makes_room_like_any_other_file(tmp_path):
    directory = NodeDirectory(tmp_path, "model", budget_bytes=10_000)
    left = tmp_path / "model" / "0-5-digest.4711.draft"
    left.write_bytes(bytes(20_000))
    directory.look_again()
    assert directory.bytes == 20_000
    directory.write(stored(0, 5))
    assert not left.exists()
    assert directory.bytes < 10_000
