"""Two hosts made of network namespaces, each with an address of its own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.213.7.1", "10.213.7.2")
_COMMANDS = """
netns add {0}
netns add {1}
link add {0} netns {0} type veth peer name {1} netns {1}
-n {0} addr add 10.213.7.1/24 dev {0}
-n {1} addr add 10.213.7.2/24 dev {1}
-n {0} link set {0} up
-n {1} link set {1} up
-n {0} link set lo up
-n {1} link set lo up
"""


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]] | None]:
    """Make both, and yield the beginning of a command on each; `None` where this is not allowed."""
    names = [f"mlx{os.getpid()}{letter}" for letter in "ab"]
    try:
        made = _make(names)
        yield tuple(["ip", "netns", "exec", name] for name in names) if made else None
    finally:
        for name in names:
            _ip("netns", "del", name)


def _make(names: list[str]) -> bool:
    commands = _COMMANDS.format(*names).strip().splitlines()
    return all(_ip(*command.split()) for command in commands)


def _ip(*arguments: str) -> bool:
    program = shutil.which("ip")
    if program is None:
        return False
    return subprocess.run([program, *arguments], check=False, capture_output=True).returncode == 0
