"""The processor time of another process: what it computed, however busy the machine was."""

import os
from pathlib import Path


def processor_seconds(pid: int) -> float | None:
    """Return the processor time that a process has used up to now; `None` without Linux's /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name, in brackets, may hold blanks.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
