"""The kernels in C are compiled for the machine, and loaded only as this user wrote them."""

import os
import subprocess

import pytest

from backend.cpu.kernels import kernels, load_kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")


def test_without_a_compiler_there_are_no_kernels(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(OSError, match="no C compiler"):
        load_kernels(tmp_path, path=str(tmp_path))
    assert not list(tmp_path.iterdir())


def compiler(tmp_path, script):
    """Return a private directory and a path of a compiler that is a script."""
    kept, found = tmp_path / "kept", tmp_path / "found"
    kept.mkdir(mode=0o700)
    found.mkdir()
    (found / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (found / "cc").chmod(0o755)
    return kept, str(found)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A path of a compiler that has compiled the kernels already, and only copies them."""
    directory = tmp_path_factory.mktemp("compiled")
    directory.chmod(0o700)
    load_kernels(directory)
    (library,) = directory.iterdir()
    _, found = compiler(tmp_path_factory.mktemp("copier"), f'cp {library} "$8"')
    return found


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (r"printf 'caf\351' >&2; exit 1", "failed: caf\ufffd"),
        ("exit 0", "cannot open shared object"),
        ('echo "$*" > "$8"', "invalid ELF header"),
        ('echo "int x;" | /usr/bin/cc -shared -o "$8" -xc -', "wrote another library.*sort_inputs"),
    ],
)
def test_a_compiler_that_works_otherwise_leaves_no_kernels(tmp_path, script, problem):
    kept, found = compiler(tmp_path, script)
    with pytest.raises(OSError, match=problem):
        load_kernels(kept, path=found)
    assert not list(kept.iterdir())


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    kept, found = compiler(tmp_path, f"(echo started; sleep 60) > {pipe}")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as children:
        with pytest.raises(subprocess.TimeoutExpired):
            load_kernels(kept, path=found, seconds=2)
        os.set_blocking(children.fileno(), True)
        assert children.read() == "started\n"
    assert not list(kept.iterdir())


@pytest.mark.parametrize("size", [0, 100, 9000])
@pytest.mark.one_in(3)
def test_kernels_that_were_cut_short_are_compiled_again(tmp_path, compiled, size):
    tmp_path.chmod(0o700)
    load_kernels(tmp_path, path=compiled)
    (library,) = tmp_path.iterdir()
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[:size])
    load_kernels(tmp_path, path=compiled)
    assert library.stat().st_size == len(whole)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_kernels_that_others_could_write_are_not_loaded(tmp_path, compiled, mode):
    tmp_path.chmod(0o700)
    load_kernels(tmp_path, path=compiled)
    (library,) = tmp_path.iterdir()
    library.chmod(mode)
    with pytest.raises(OSError, match="no C compiler"):
        load_kernels(tmp_path, path="")


def test_they_are_compiled_once_for_a_private_directory(tmp_path, compiled):
    tmp_path.chmod(0o700)
    load_kernels(tmp_path, path=compiled)
    (library,) = tmp_path.iterdir()
    written = library.stat().st_mtime_ns
    load_kernels(tmp_path, path="")
    assert [library] == list(tmp_path.iterdir())
    assert library.stat().st_mtime_ns == written


def test_a_directory_of_everybodys_has_a_part_for_each_user(tmp_path, compiled):
    tmp_path.chmod(0o1777)
    load_kernels(tmp_path, path=compiled)
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o7777 == 0o700
    load_kernels(tmp_path, path="")
    own.chmod(0o777)
    with pytest.raises(OSError, match="no C compiler"):
        load_kernels(tmp_path, path="")


def test_they_are_not_kept_where_others_could_exchange_them(tmp_path, compiled):
    tmp_path.chmod(0o777)
    load_kernels(tmp_path, path=compiled)
    assert not list(tmp_path.iterdir())
