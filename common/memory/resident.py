"""The resident memory of a process, and sizes in words."""

import os
from pathlib import Path


def resident_bytes(process_id: int) -> int:
    """Return the physical memory of a process in bytes; 0 where the system does not say (macOS)."""
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def in_words(size_bytes: int) -> str:
    """Return a size for a reader, in the decimal units of the command line."""
    megabytes = size_bytes / 1e6
    return f"{megabytes:,.1f} MB" if megabytes < 1000 else f"{megabytes / 1000:,.2f} GB"
