"""The memory that a process holds."""

import os
from pathlib import Path


def resident_bytes(process_id: int) -> int:
    """Return how much physical memory a process holds; 0 where the system does not say (macOS)."""
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
