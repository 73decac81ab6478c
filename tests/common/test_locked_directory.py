"""Files of processes that come, go and die, in one directory."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.directories import (
    MAX_FILE_BYTES,
    ForeignDirectoryError,
    LockedDirectory,
    replace_file,
    temporary_directory,
)

TIMEOUT_S = 5.0
WRITER = """
import sys
from pathlib import Path
from common.directories import LockedDirectory
directory = LockedDirectory(Path(sys.argv[1]))
with directory.exclusive(5.0):
    directory.write(b"mine")
print("ready", flush=True)
sys.stdin.readline()
"""


def seen(directory):
    """Return the data of the others, as a member reads them."""
    with directory.exclusive(TIMEOUT_S):
        return sorted(directory.others().values())


def told(path, data):
    """Return a new member that has told something."""
    directory = LockedDirectory(path)
    with directory.exclusive(TIMEOUT_S):
        directory.write(data)
    return directory


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def reader(path):
    directory = told(path, b"reader")
    yield directory
    directory.close()


def test_members_read_what_the_others_wrote_last(path, reader):
    writer = told(path, b"a long first word")
    with writer.exclusive(TIMEOUT_S):
        writer.write(b"short")
        assert list(writer.others().values()) == [b"reader"]
    assert seen(reader) == [b"short"]
    writer.close()
    assert seen(reader) == []


def test_only_the_user_may_look_in(path, reader):
    (file,) = path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert seen(reader) == []


def test_a_process_that_is_killed_leaves_nothing(path, reader):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        assert seen(reader) == [b"mine"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert seen(reader) == []
    assert len(list(path.iterdir())) == 1


def test_one_that_stays_inside_is_waited_for_no_longer_than_asked(path, reader):
    other = LockedDirectory(path)
    with (
        other.exclusive(TIMEOUT_S),
        pytest.raises(TimeoutError, match="holds the lock"),
        reader.exclusive(0.01),
    ):
        raise AssertionError("two were inside")
    with reader.exclusive(0.01):
        pass
    other.close()


def test_what_a_cleaner_has_removed_is_made_again(path, reader):
    other = told(path, b"other")
    for file in path.iterdir():
        file.unlink()
    with other.exclusive(TIMEOUT_S):
        other.write(b"other")
    assert seen(reader) == [b"other"]
    with reader.exclusive(TIMEOUT_S):
        reader.write(b"reader")
    assert seen(other) == [b"reader"]
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert seen(reader) == []
    with other.exclusive(TIMEOUT_S):
        other.write(b"again")
    assert seen(reader) == [b"again"]
    other.close()


def test_a_directory_that_others_can_enter_is_refused(path):
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(ForeignDirectoryError, match="chmod 700"):
        LockedDirectory(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
def test_a_directory_of_all_users_is_refused_and_nobody_told_to_close_it(path):
    path.mkdir()
    path.chmod(0o1777)
    with pytest.raises(ForeignDirectoryError, match="all users: name one inside it"):
        LockedDirectory(path)


def test_a_file_in_the_place_of_a_directory_is_told_as_one(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "findings.json", tmp_path / "file" / "more" / "findings.json"):
        with pytest.raises(NotADirectoryError):
            replace_file(path, b"")


def test_a_directory_of_somebody_else_is_refused(path):
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ForeignDirectoryError, match="another user"):
        LockedDirectory(path)


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_a_link_in_the_place_of_the_directory_is_not_followed(path, tmp_path, target):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / target)
    with pytest.raises(ForeignDirectoryError, match="ledger is a link"):
        LockedDirectory(path)
    assert not list((tmp_path / "elsewhere").iterdir())


def lock(file):
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_what_is_no_file_of_a_member_is_left_alone(path, reader, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("weights")
    names = [f"{n}-0123456789abcdef.entry" for n in range(3)]
    (path / names[0]).symlink_to(precious)
    os.mkfifo(path / names[1])
    (path / names[2]).mkdir()
    (path / "notes.txt").write_text("mine")
    assert seen(reader) == []
    assert precious.read_text() == "weights"
    assert {each.name for each in path.iterdir()} >= {*names, "notes.txt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_file_of_somebody_else_is_not_read(path, reader):
    file = path / "1-0123456789abcdef.entry"
    file.write_bytes(b"foreign")
    os.chown(file, 12345, 12345)
    descriptor = lock(file)
    assert seen(reader) == []
    os.close(descriptor)
    assert seen(reader) == []
    assert file.exists()


def test_of_a_bomb_no_more_is_read_than_an_entry_may_hold(path, reader):
    file = path / "1-0123456789abcdef.entry"
    file.write_bytes(b"x" * (2 * MAX_FILE_BYTES))
    descriptor = lock(file)
    (data,) = seen(reader)
    os.close(descriptor)
    assert len(data) == MAX_FILE_BYTES


def die(member):
    """End as the kernel ends a process: descriptors are closed, and nothing else."""
    for descriptor in (member.directory, member.file):
        if descriptor is not None:
            os.close(descriptor)


def clean(path):
    for file in path.iterdir() if path.exists() else ():
        file.unlink()


@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "tell", "go", "die", "clean"]), st.integers(0, 3)),
        max_size=25,
    )
)
def test_everybody_sees_exactly_who_is_there(tmp_path_factory, events):
    path = Path(tmp_path_factory.mktemp("ledger")) / "ledger"
    members, words = {}, {}
    for number, (event, who) in enumerate(events):
        if event == "come" and who not in members:
            members[who], words[who] = LockedDirectory(path), b""
        if event == "tell" and who in members:
            words[who] = str(number).encode()
            with members[who].exclusive(TIMEOUT_S):
                members[who].write(words[who])
        if event == "go" and who in members:
            members.pop(who).close()
        if event == "die" and who in members:
            die(members.pop(who))
        if event == "clean":
            clean(path)
        for each, member in members.items():
            with member.exclusive(TIMEOUT_S):
                member.write(words[each])
        for each, member in members.items():
            others = [word for other, word in words.items() if other in members and other != each]
            assert seen(member) == sorted(others)
    for member in members.values():
        member.close()


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_without_a_umask_missing_parents_are_private_too(tmp_path):
    state = tmp_path / "home" / "local" / "state"
    kept = temporary_directory(state)
    assert kept.is_relative_to(state)
    for made in (kept, state, state.parent, state.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == stat.S_IRWXU


def test_temporary_files_are_kept_for_later_processes(tmp_path):
    assert temporary_directory(tmp_path) == temporary_directory(tmp_path)


def test_temporary_files_go_where_there_is_room(tmp_path, caplog):
    caplog.set_level("INFO")
    assert not temporary_directory(tmp_path, room_bytes=2**62).is_relative_to(tmp_path)
    assert "bytes free" in caplog.text


def made_open(state):
    state.mkdir()
    state.chmod(0o777)


def linked(state):
    state.mkdir(0o700)
    (state / "elsewhere").mkdir(0o700)
    (state / "tmp").symlink_to(state / "elsewhere")


def let_others_in(state):
    (state / "tmp").mkdir(parents=True)
    (state / "tmp").chmod(0o750)


def filled(state):
    state.write_bytes(b"")


@pytest.mark.parametrize("spoil", [made_open, linked, let_others_in, filled])
def test_where_others_could_change_temporary_files_a_new_directory_is_used(tmp_path, spoil):
    state = tmp_path / "state"
    spoil(state)
    found = temporary_directory(state)
    assert not found.is_relative_to(tmp_path / "state")
    assert stat.S_IMODE(found.stat().st_mode) == stat.S_IRWXU
