"""Directories of jobs: removed whatever happens, and nothing else ever."""

import fcntl
import os
import subprocess
import sys

import pytest

from backend.errors import InvalidRequestError
from backend.jobs.scratch import (
    MARK,
    leftovers,
    remove_leftovers,
    scratch,
    was_cut_off,
    written_whole,
)

KILLED = """
import os, sys
from pathlib import Path
from backend.jobs.scratch import scratch
with scratch(Path(sys.argv[1])) as content:
    content.mkdir()
    (content / "half").write_text("x")
    os._exit(1)
"""


def left_by_a_killed_process(path):
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    return path


def write(field, target, **options):
    with written_whole(field, target, **options) as partial:
        partial.mkdir()
        (partial / "new").write_text("new")


def test_the_content_of_a_killed_process_is_removed_by_the_next(tmp_path):
    path = left_by_a_killed_process(tmp_path / ".work")
    assert leftovers(path) == [path]
    with scratch(path) as content:
        assert content.parent == path
        assert not content.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link"])
def test_what_has_no_mark_is_left_alone_whatever_its_name(tmp_path, kind):
    place, elsewhere = tmp_path / "out" / ".work", tmp_path / "elsewhere"
    place.parent.mkdir()
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    if kind == "directory":
        place.mkdir()
        (place / "mine").write_text("mine")
    elif kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with scratch(place) as content:
        content.mkdir()
        assert not content.resolve().is_relative_to(elsewhere)
        assert content.resolve().is_relative_to(place.parent)
    remove_leftovers(place)
    assert sorted(tmp_path.rglob("*")) == before
    assert (elsewhere / "mine").read_text() == "mine"


def test_a_link_to_a_leftover_and_a_mark_that_is_a_link_are_nobodys(tmp_path):
    leftover = left_by_a_killed_process(tmp_path / ".work")
    (tmp_path / ".other").symlink_to(leftover)
    assert not leftovers(tmp_path / ".other")
    (tmp_path / ".third").mkdir()
    (tmp_path / ".third" / MARK).symlink_to(leftover / MARK)
    assert not leftovers(tmp_path / ".third")


def test_the_directory_of_a_living_job_is_left_alone(tmp_path):
    path = left_by_a_killed_process(tmp_path / ".work")
    mark = os.open(path / MARK, os.O_RDWR)
    fcntl.flock(mark, fcntl.LOCK_EX)
    assert not leftovers(path)
    with scratch(path) as content:
        assert content.parent == tmp_path / ".work-1"
    os.close(mark)
    assert leftovers(path) == [path]


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link"])
def test_a_target_that_is_not_ours_is_never_replaced(tmp_path, kind):
    target, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "directory":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError, match=r"output_dir: .*out exists already"):
        write("output_dir", target, may_replace=lambda path: path.is_symlink())
    assert not list(elsewhere.iterdir())


def test_a_target_of_ours_stays_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "out"
    write("output_dir", target)
    (target / "old").write_text("old")
    with pytest.raises(ZeroDivisionError), written_whole("f", target, may_replace=bool):
        raise ZeroDivisionError
    assert (target / "old").exists()
    write("output_dir", target, may_replace=bool)
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_foreign_directory_under_the_name_of_ours_is_not_a_cut_off_job(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    assert not was_cut_off(tmp_path / "out")
    left_by_a_killed_process(tmp_path / ".out.partial-1")
    assert was_cut_off(tmp_path / "out")


def test_a_target_below_a_file_names_its_field(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match="output_dir: "):
        write("output_dir", tmp_path / "file" / "out")
