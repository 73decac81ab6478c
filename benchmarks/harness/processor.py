"""The processor time of another process, independent of other load."""

import os
from pathlib import Path


def processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process so far; `None` without Linux's /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name, in brackets, may contain spaces.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
