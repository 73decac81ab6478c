"""A process can use the cores that it may run on, or fewer if a control group limits its time."""

import os

import pytest
from kernel_files import V1, V2, System

from common.process import usable_cores

ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def test_without_control_groups_it_is_those_it_may_run_on(tmp_path):
    assert usable_cores(tmp_path) == ALLOWED


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", ALLOWED),
        ("9900000 100000", ALLOWED),
        ("100000 100000", 1),
        # Half a core, and nonsense.
        ("50000 100000", 1),
        ("100000", ALLOWED),
        ("100000 0", ALLOWED),
        ("", ALLOWED),
    ],
)
def test_a_quota_is_a_share_of_the_cores(tmp_path, limit, cores):
    system = System(tmp_path, V2, "0::/a")
    system.limit("a", limit, "cpu.max")
    assert usable_cores(tmp_path) == cores


def test_any_group_on_the_path_may_hold_the_quota(tmp_path):
    system = System(tmp_path, V2, "0::/a/b")
    system.limit("a/b", "max 100000", "cpu.max")
    system.limit("a", "100000 100000", "cpu.max")
    system.limit("other", "50000 100000", "cpu.max")
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(("quota", "cores"), [("-1", ALLOWED), ("100000", 1)])
def test_version_1_has_a_hierarchy_for_processors(tmp_path, quota, cores):
    mount = V1.replace("memory", "cpu,cpuacct")
    system = System(tmp_path, mount, "4:cpu,cpuacct:/docker/box", point="/sys/fs/cgroup/cpu")
    system.limit("docker/box", quota, "cpu.cfs_quota_us")
    system.limit("docker/box", "100000", "cpu.cfs_period_us")
    assert usable_cores(tmp_path) == cores
