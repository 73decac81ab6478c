"""The resident memory of a process."""

import os
from pathlib import Path


def resident_bytes(process_id: int) -> int:
    """Return the physical memory of a process in bytes; 0 where the system does not say (macOS)."""
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
