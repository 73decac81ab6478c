"""The file of experts: its contents, its replacement, and the drafts beside it."""

import fcntl
import os

import mlx.core as mx
import pytest

from backend.errors import LoadError
from backend.model.checkpoint.expert_store import STORE_NAME, ExpertLayer, ReadAhead, open_store
from backend.model.experts import HeldExperts

pytestmark = pytest.mark.mlx

DRAFT = f".{STORE_NAME}.0123456789abcdef"


def opened(folder, key="a", layers=2):
    sources = [{"weight": mx.arange(24.0).reshape(3, 2, 4) + n} for n in range(layers)]
    described = [ExpertLayer(f"layers.{n}", arrays) for n, arrays in enumerate(sources)]
    return open_store([folder], described, sources, key), described


def test_an_expert_comes_back_as_it_was_written(tmp_path):
    store, layers = opened(tmp_path)
    (array,) = layers[1].arrays(store.read(1, 2)).values()
    assert array.tolist() == [(mx.arange(16.0, 24.0).reshape(2, 4) + 1).tolist()]
    assert [file.name for file in tmp_path.iterdir()] == [STORE_NAME]


def test_a_line_says_what_is_written_and_where_before_it_is(tmp_path, caplog):
    caplog.set_level("INFO")
    opened(tmp_path)
    opened(tmp_path)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("writing ")
    assert str(tmp_path / STORE_NAME) in line


def test_a_store_of_other_weights_is_replaced(tmp_path):
    opened(tmp_path)
    before = (tmp_path / STORE_NAME).stat().st_ino
    opened(tmp_path)
    assert (tmp_path / STORE_NAME).stat().st_ino == before
    opened(tmp_path, "b")
    assert (tmp_path / STORE_NAME).stat().st_ino != before


def test_experts_that_are_read_ahead_are_those_that_are_taken(tmp_path):
    store, _ = opened(tmp_path)
    reading = ReadAhead(store)
    keys = [(layer, expert) for layer in (0, 1) for expert in range(3)]
    reading.plan([*keys, *keys])
    for key in (keys[0], keys[4], *keys[1:]):
        assert reading.take(key) == store.read(*key)
    reading.plan(keys[::-1])
    assert [reading.take(key) for key in keys[::-1]] == [store.read(*key) for key in keys[::-1]]


def passes(held, layers, experts, count=1):
    """Have all layers use the same experts in so many passes; returns how many were found."""
    found = 0
    for layer in list(range(layers)) * count:
        keys = [(layer, expert) for expert in experts]
        found += sum(key in held for key in keys)
        for key in sorted(keys, key=lambda key: key not in held):
            if key not in held:
                while (oldest := held.in_the_way(key, 4)) is not None:
                    held.drop(oldest)
                held.add(key, {"weight": mx.zeros(1)})
            held.touch(key)
            assert held.nbytes <= 32
    return found


def test_a_layer_finds_experts_although_a_pass_needs_more_than_fit():
    held = HeldExperts([32] * 4, 32)
    assert passes(held, 4, range(3)) == 0
    assert passes(held, 4, range(3), count=5) == 5 * 4 * 2


def test_a_layer_takes_the_room_that_others_leave():
    held = HeldExperts([32] * 4, 32)
    passes(held, 1, range(8))
    assert passes(held, 1, range(8)) == 8
    passes(held, 4, range(2))
    assert passes(held, 4, range(2)) == 8


def test_one_expert_of_all_layers_is_enough():
    held = HeldExperts([32] * 4, 4)
    assert passes(held, 4, range(2), count=2) == 0
    assert held.nbytes == 4


def a_file(path):
    path.write_text("somebody's own")


def a_link(path):
    path.with_name("elsewhere").write_text("somebody's own")
    path.symlink_to(path.with_name("elsewhere"))


def a_broken_link(path):
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("make", [a_file, a_link, a_broken_link, os.mkdir, os.mkfifo])
def test_what_has_the_name_of_a_store_and_is_none_stays(tmp_path, make):
    make(tmp_path / STORE_NAME)
    before = sorted((file.name, file.lstat().st_ino) for file in tmp_path.iterdir())
    with pytest.raises(LoadError, match=r"experts\.store is in the way"):
        opened(tmp_path)
    assert sorted((file.name, file.lstat().st_ino) for file in tmp_path.iterdir()) == before


def test_drafts_are_removed_unless_a_process_still_writes_them(tmp_path):
    opened(tmp_path)
    mark = (tmp_path / STORE_NAME).read_bytes()[:22]
    abandoned, own = tmp_path / DRAFT, tmp_path / f"{DRAFT}0"
    abandoned.write_bytes(mark)
    own.write_text("somebody's own")
    with (tmp_path / f"{DRAFT}1").open("wb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        written.write(mark)
        written.flush()
        opened(tmp_path, "b")
        assert {file.name for file in tmp_path.iterdir()} == {
            STORE_NAME,
            own.name,
            f"{DRAFT}1",
        }
