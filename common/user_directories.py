"""Directories of one user, the same for all processes of that user on a machine."""

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = "mlx-grpc-backend"


def state_directory(
    environment: Mapping[str, str], platform: str = sys.platform, home: Path | None = None
) -> Path:
    """Return where this user's backends keep what outlives them; not created.

    Never a temporary or a runtime directory: hosts give each process its own, and remove it.

    Args:
        environment: May move it, by `XDG_STATE_HOME`.
        platform: As in `sys.platform`.
        home: The user's, as recorded by the system unless given: services lack `HOME`.
    """
    moved = Path(environment.get("XDG_STATE_HOME", ""))
    if moved.is_absolute():
        return moved / NAME
    home = home or _home(environment)
    if platform == "darwin":
        return home / "Library" / "Application Support" / NAME
    return home / ".local" / "state" / NAME


def _home(environment: Mapping[str, str]) -> Path:
    told = Path(environment.get("HOME", ""))
    if told.is_absolute():
        return told
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a container may run as a user without an entry
        return Path("/")
