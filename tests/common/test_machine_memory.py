"""The smallest limit of any control group above a process is its memory."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import kernel_files
import pytest
from kernel_files import V1, V2

from common.machine_memory import in_words, machine_bytes

MIB = 2**20


def physical():
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class System(kernel_files.System):
    """With the memory that a process has there."""

    def bytes(self):
        return machine_bytes(self.root)


def test_without_control_groups_it_is_the_physical_memory(tmp_path):
    assert machine_bytes(tmp_path) == physical()


@pytest.mark.parametrize("limited", ["", "system.slice", "system.slice/localai.service"])
def test_any_group_on_the_path_may_hold_the_limit(tmp_path, limited):
    system = System(tmp_path, V2, "0::/system.slice/localai.service")
    for group in ("system.slice", "system.slice/localai.service", "user.slice"):
        system.limit(group, "max")
    system.limit("user.slice", MIB)
    assert system.bytes() == physical()
    system.limit(limited, 700 * MIB)
    assert system.bytes() == 700 * MIB


@pytest.mark.parametrize("smallest", ["a", "a/b", "a/b/c"])
def test_the_smallest_limit_counts(tmp_path, smallest):
    system = System(tmp_path, V2, "0::/a/b/c")
    for group in ("a", "a/b", "a/b/c"):
        system.limit(group, 300 * MIB if group == smallest else 900 * MIB)
    assert system.bytes() == 300 * MIB


def test_memory_high_slows_a_process_down_and_counts_as_well(tmp_path):
    system = System(tmp_path, V2, "0::/a")
    system.limit("a", 900 * MIB)
    system.limit("a", 800 * MIB, "memory.high")
    assert system.bytes() == 800 * MIB


def test_version_1_has_a_hierarchy_for_memory(tmp_path):
    groups = "9:name=systemd:/other\n4:cpu,memory:/docker/box\n0::/"
    system = System(tmp_path, V1, groups, point="/sys/fs/cgroup/memory")
    system.limit("docker/box", 2**63 - 4096, "memory.limit_in_bytes")
    assert system.bytes() == physical()
    system.limit("docker", 500 * MIB, "memory.limit_in_bytes")
    assert system.bytes() == 500 * MIB


def test_version_1_tells_of_limits_that_a_container_cannot_see(tmp_path):
    system = System(tmp_path, V1, "4:memory:/docker/box", top="/docker/box")
    system.limit(".", 900 * MIB, "memory.limit_in_bytes")
    system.limit(".", f"cache 0\nhierarchical_memory_limit {400 * MIB}", "memory.stat")
    assert system.bytes() == 400 * MIB


@pytest.mark.parametrize(
    ("top", "cgroup", "limited"),
    [
        ("/docker/box", "0::/docker/box", "."),
        ("/docker/box", "0::/docker/box/inner", "inner"),
        ("/", "0::/../outside", "."),
        ("/../..", "0::/", "."),
    ],
    ids=["own mount", "below its mount", "outside of its namespace", "mount from outside"],
)
def test_a_container_sees_a_part_of_the_hierarchy(tmp_path, top, cgroup, limited):
    system = System(tmp_path, V2, cgroup, top=top)
    system.limit(limited, 600 * MIB)
    assert system.bytes() == 600 * MIB


def test_a_mount_point_may_have_spaces(tmp_path):
    system = System(tmp_path, V2, "0::/a", point="/my\\040groups")
    system.limit("a", 600 * MIB)
    assert system.bytes() == 600 * MIB


@pytest.mark.parametrize("text", ["max", "", "-1", "nonsense", str(2**63)])
def test_what_is_no_number_below_the_physical_memory_is_no_limit(tmp_path, text):
    system = System(tmp_path, V2, "0::/a")
    system.limit("a", text)
    assert system.bytes() == physical()


@pytest.fixture
def real_group():
    """A control group of this machine with a limit of 512 MiB, a group below that of the tests."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    own = "".join(line.split(":")[2] for line in lines if ":memory:" in line)
    group = Path(f"/sys/fs/cgroup/memory{own}/test-{uuid.uuid4().hex}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a control group of version 1 that this user may divide")
    yield group
    group.rmdir()


def test_the_limit_of_a_real_group_is_seen_two_groups_below(real_group):
    (real_group / "memory.limit_in_bytes").write_text(str(512 * MIB))
    inner = real_group / "inner"
    inner.mkdir()
    code = f"""
import os
open({str(inner / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from common.machine_memory import machine_bytes
print(machine_bytes())
"""
    try:
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    finally:
        inner.rmdir()
    assert int(said.stdout) == 512 * MIB


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [(0, "0.0 MB"), (1_739_520, "1.7 MB"), (999_940_000, "999.9 MB"), (15_353_909_406, "15.35 GB")],
)
def test_sizes_are_told_in_the_units_of_the_command_line(size_bytes, words):
    assert in_words(size_bytes) == words
