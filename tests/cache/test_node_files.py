"""Nodes on disk: written ones come back, and nothing else ever does."""

import os
import queue
import random
import resource
import time
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from backend.cache import disk_tier
from backend.cache.disk_tier import DiskTier, NodeDirectory, StoredNode
from backend.cache.kv import Block, Segment, Snapshot, State, evaluate, from_plain, to_plain
from backend.cache.node_files import (
    FOLDER_NAME,
    FORMAT,
    DamagedFileError,
    read_header,
    read_node,
    write_node,
)
from backend.cache.radix import TokenKey

pytestmark = pytest.mark.mlx

MODEL = "0123456789abcdef01234567"
OTHER = "fedcba987654321001234567"
DIGEST = "0" * 32
ANYWHERE = {"ends_at_snapshot": False}


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


def save(path, node, model=MODEL):
    with path.open("wb") as file:
        write_node(file, model, node.key, node.start, node.segment)


def load(read, path, model=MODEL):
    with path.open("rb") as file:
        return read(file, model)


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and mx.array_equal(one, other)


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_segment_comes_back_as_it_was(tmp_path, has_snapshot):
    path, key = tmp_path / "node.kv", TokenKey.from_ids([-5, 2**40, 3, 4, 5])
    written = segment(3, has_snapshot=has_snapshot)
    save(path, StoredNode(key, 2, to_plain(written)))
    header, plain = load(read_node, path)
    read = from_plain(plain)
    assert header == load(read_header, path)
    assert (header.key, header.start, header.has_snapshot) == (key, 2, has_snapshot)
    for one, other in zip(written.blocks[0].layers, read.blocks[0].layers, strict=True):
        assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    if has_snapshot:
        [before], [after] = written.snapshot.states, read.snapshot.states
        assert after.arrays[0] is None
        assert equal(before.arrays[1], after.arrays[1])
        assert after.numbers == before.numbers


def test_any_reader_of_safetensors_can_open_a_file(tmp_path):
    path, node = tmp_path / "node.kv", stored(2, 5, has_snapshot=True)
    save(path, node)
    with safe_open(path, framework="np") as file:
        assert file.get_tensor("key").tobytes() == node.key.packed
        for index, array in enumerate(node.segment.arrays):
            assert file.get_tensor(f"array.{index}").tobytes() == bytes(array.data)


def test_no_bit_of_a_file_may_change(tmp_path):
    path = tmp_path / "node.kv"
    node = stored(2, 5, has_snapshot=True)
    save(path, node)
    content = path.read_bytes()
    rng = random.Random(1)
    for _ in range(400):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            load(read_node, path)
    for length in range(0, len(content), 17):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFileError):
            load(read_node, path)


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
    path = tmp_path / "node.kv"
    metadata = {"format": FORMAT, "fingerprint": MODEL, "about": about}
    save_file({"key": np.zeros(2, np.int64)}, path, metadata | {"checksum": ""})
    for read in (read_header, read_node):
        with pytest.raises(DamagedFileError):
            load(read, path)


def test_a_file_of_another_model_is_not_read(tmp_path):
    path = tmp_path / "node.kv"
    save(path, stored(0, 5))
    with pytest.raises(DamagedFileError, match="another model"):
        load(read_header, path, OTHER)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nodes_are_found_in_whatever_order_they_were_written(tmp_path, order):
    nodes = [stored(0, 40), stored(40, 70), stored(70, 100)]
    directory = NodeDirectory(tmp_path, MODEL, 10**9)
    for i in order:
        directory.write(nodes[i])
    key = TokenKey.from_ids([*range(90), 7, 7])
    for reader in (directory, NodeDirectory(tmp_path, MODEL, 10**9)):
        read = reader.read(key, 0, ends_at_snapshot=False)
        assert [(node.start, len(node.key)) for node in read] == [(0, 40), (40, 70), (70, 100)]
        known = reader.read(key, 50, ends_at_snapshot=False)
        assert [node.start for node in known] == [40, 70]


def test_nothing_behind_the_last_snapshot_is_read_where_only_snapshots_help(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 10**9)
    for node in (stored(0, 40, has_snapshot=True), stored(40, 70), stored(70, 100)):
        directory.write(node)
    key = TokenKey.from_ids(range(100))
    assert [n.start for n in directory.read(key, 0, ends_at_snapshot=True)] == [0]
    directory.write(stored(40, 70, has_snapshot=True))
    assert [n.start for n in directory.read(key, 0, ends_at_snapshot=True)] == [0, 40]


def test_the_last_token_of_a_prompt_is_never_read(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 10**9)
    directory.write(stored(0, 50, has_snapshot=True))
    for length, found in ((50, 0), (51, 1)):
        key = TokenKey.from_ids(range(length))
        assert len(directory.read(key, 0, ends_at_snapshot=True)) == found


def test_the_oldest_files_of_all_models_make_room(tmp_path):
    for model in (OTHER, MODEL):
        directory = NodeDirectory(tmp_path, model, 60_000)
        for start in range(0, 1000, 100):
            directory.write(stored(start, start + 100))
    assert not list(tmp_path.glob(f"*/{OTHER}/*"))
    sizes = [path.stat().st_size for path in tmp_path.glob(f"*/{MODEL}/*")]
    assert 30_000 < sum(sizes) <= 75_000


def test_files_of_the_future_make_room_first_for_the_clock_may_have_been_set_back(tmp_path):
    directory = NodeDirectory(tmp_path, OTHER, 60_000)
    for start in range(0, 1000, 100):
        directory.write(stored(start, start + 100))
    later = time.time() + 10**8
    of_the_future = list(tmp_path.glob(f"*/{OTHER}/*"))
    for path in of_the_future:
        os.utime(path, (later, later))
    directory = NodeDirectory(tmp_path, MODEL, 60_000)
    for start in range(0, 300, 100):
        directory.write(stored(start, start + 100))
    assert len(list(tmp_path.glob(f"*/{MODEL}/*"))) == 3
    assert len(list(tmp_path.glob(f"*/{OTHER}/*"))) < len(of_the_future)


def test_what_a_killed_writer_leaves_makes_room_like_any_other_file(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, budget_bytes=10_000)
    left = tmp_path / FOLDER_NAME / MODEL / f"0-900-{DIGEST}.0123456789abcdef.draft"
    save(left, stored(0, 900))
    left.write_bytes(left.read_bytes()[:20_000])
    directory.look_again()
    assert directory.bytes == 20_000
    directory.write(stored(0, 5))
    assert not left.exists()
    assert directory.bytes < 10_000


def test_a_node_that_is_larger_than_all_files_may_be_costs_no_other_its_place(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 20_000)
    directory.write(stored(0, 50))
    directory.write(stored(0, 2000))
    assert [node.start for node in directory.read(TokenKey.from_ids(range(60)), 0, **ANYWHERE)]
    assert directory.bytes < 20_000


def only_state(place):
    """The state after the first tokens, without their keys and values."""
    whole = segment(1, has_snapshot=True)
    return StoredNode(TokenKey.from_ids(range(place)), place, to_plain(Segment((), whole.snapshot)))


@pytest.mark.parametrize("place", [20, 50])
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_state_in_a_file_of_its_own_is_read_with_the_tokens_before_it(
    tmp_path, place, comes_first
):
    directory = NodeDirectory(tmp_path, MODEL, 10**9)
    nodes = [stored(0, 50), only_state(place)]
    for node in reversed(nodes) if comes_first else nodes:
        directory.write(node)
    for reader in (directory, NodeDirectory(tmp_path, MODEL, 10**9)):
        found = reader.read(TokenKey.from_ids(range(60)), 0, ends_at_snapshot=True)
        assert [(node.start, len(node.key)) for node in found] == [(0, 50), (place, place)]
        assert from_plain(found[1].segment).snapshot is not None
    assert directory.read(TokenKey.from_ids(range(19)), 0, ends_at_snapshot=True) == []


def test_what_files_hold_is_not_written_again_however_it_is_divided(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 10**9)
    directory.write(stored(0, 50, has_snapshot=True))
    directory.write(stored(50, 80))
    written = directory.written_bytes
    directory.write(stored(0, 80))
    directory.write(stored(20, 50, has_snapshot=True))
    assert directory.written_bytes == written
    directory.write(only_state(80))
    assert directory.written_bytes > written
    assert directory.take_lost() == []


def test_what_is_not_written_or_had_to_make_room_is_told(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 10_000)
    for start in (0, 50, 100, 150, 200):
        directory.write(stored(start, start + 50))
    directory.write(stored(0, 2000))
    lost = directory.take_lost()
    assert lost[-1].key == TokenKey.from_ids(range(2000))
    assert {node.start for node in lost[:-1]}
    assert directory.take_lost() == []
    for path in tmp_path.glob("*/*/*.kv"):
        path.unlink()
    directory.look_again()
    assert {node.start for node in [*lost[:-1], *directory.take_lost()]} == {0, 50, 100, 150, 200}


def tell_nobody():
    pass


def test_a_node_larger_than_all_that_may_wait_is_written_when_nothing_else_waits(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_tier, "MAX_PENDING_BYTES", 10)
    tier = DiskTier(NodeDirectory(tmp_path, MODEL, 10**9), tell_nobody, ends_at_snapshots=False)
    assert tier.write(stored(0, 50))
    tier.close(timeout_s=60)
    assert tier.metrics["prompt_cache.disk.written_bytes"] == stored(0, 50).segment.nbytes


@contextmanager
def full_disk(file_bytes):
    """No file may become larger, as on a disk that is full."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def test_what_a_full_disk_refuses_leaves_nothing_behind(tmp_path):
    directory = NodeDirectory(tmp_path, MODEL, 10**6)
    directory.write(stored(0, 20))
    before = sorted(tmp_path.rglob("*"))
    with full_disk(1000), pytest.raises(OSError, match="too large"):
        directory.write(stored(20, 200))
    assert sorted(tmp_path.rglob("*")) == before
    assert directory.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    directory.write(stored(20, 200))
    assert [
        node.start for node in directory.read(TokenKey.from_ids(range(200)), 0, **ANYWHERE)
    ] == [
        0,
        20,
    ]


def test_a_full_disk_is_told_once_however_much_it_refuses(tmp_path, caplog):
    tier = DiskTier(NodeDirectory(tmp_path, MODEL, 10**6), tell_nobody, ends_at_snapshots=False)
    with full_disk(1000):
        for start in range(0, 1000, 100):
            assert tier.write(stored(start, start + 100))
        tier.close(timeout_s=60)
    told = [record for record in caplog.records if "failed (" in record.message]
    assert len(told) == 1


class Failing(NodeDirectory):
    """Has a mistake in it."""

    def write(self, node):
        raise KeyError(node.start)


def test_a_tier_whose_thread_fails_says_so_once_and_keeps_nobody_waiting(tmp_path, caplog):
    tier = DiskTier(Failing(tmp_path, MODEL, 10**9), tell_nobody, ends_at_snapshots=False)
    found = queue.SimpleQueue()
    tier.write(stored(0, 5))
    key = TokenKey.from_ids(range(5))
    # The one that waits is told, and all later ones at once.
    while tier.read(key, 0, found.put):
        assert found.get(timeout=60) in ([], ())
    assert not tier.write(stored(0, 5))
    tier.close(timeout_s=60)
    told = [record for record in caplog.records if "the disk is no longer used" in record.message]
    assert len(told) == 1
