import os

import pytest

from backend.cache.digests import DigestFile


def digest(number):
    return number.to_bytes(32, "big")


@pytest.fixture
def file(tmp_path):
    return DigestFile(tmp_path / "folder" / "digests", 4)


def test_a_file_that_is_not_there_holds_nothing(file):
    assert file.read() == []
    assert not file.path.parent.exists()


def test_digests_come_back_in_their_order(file):
    for number in range(3):
        file.add(digest(number))
    assert file.read() == [digest(number) for number in range(3)]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_only_the_latest_are_kept_and_the_file_stays_small(file):
    for number in range(100):
        file.add(digest(number))
        assert file.path.stat().st_size < 11 * 65
    assert file.read() == [digest(number) for number in range(96, 100)]
    assert list(file.path.parent.iterdir()) == [file.path]


def test_a_line_that_was_cut_short_costs_itself_and_the_next(file):
    file.add(digest(1))
    with file.path.open("ab") as raw:
        raw.write(b"0123")
    file.add(digest(2))
    file.add(digest(3))
    assert file.read() == [digest(1), digest(3)]


@pytest.mark.parametrize("content", [b"notes\n", b"x" * 1000])
def test_another_file_is_left_alone(file, content):
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    with pytest.raises(OSError, match="was not written by this backend"):
        file.read()
    with pytest.raises(OSError, match="was not written by this backend"):
        file.add(digest(1))
    assert file.path.read_bytes() == content


def test_a_file_that_another_process_has_only_just_made_is_empty(file):
    file.path.parent.mkdir()
    file.path.touch()
    assert file.read() == []
    file.add(digest(1))
    assert file.read() == [digest(1)]


def test_a_link_is_not_followed(file, tmp_path):
    other = DigestFile(tmp_path / "digests", 4)
    other.add(digest(1))
    file.path.parent.mkdir()
    file.path.symlink_to(other.path)
    with pytest.raises(OSError, match="symbolic links"):
        file.add(digest(2))
    assert other.read() == [digest(1)]


@pytest.mark.timeout(20)
def test_a_pipe_is_refused(file):
    file.path.parent.mkdir()
    os.mkfifo(file.path)
    with pytest.raises(OSError, match="is no regular file"):
        file.read()
