"""The file of experts: who may replace it, and what is beside it."""

import fcntl
import os

import mlx.core as mx
import pytest

from backend.errors import LoadError
from backend.model.checkpoint.expert_store import STORE_NAME, ExpertLayer, open_store

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


def test_a_store_of_other_weights_is_replaced(tmp_path):
    opened(tmp_path)
    before = (tmp_path / STORE_NAME).stat().st_ino
    opened(tmp_path)
    assert (tmp_path / STORE_NAME).stat().st_ino == before
    opened(tmp_path, "b")
    assert (tmp_path / STORE_NAME).stat().st_ino != before


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
