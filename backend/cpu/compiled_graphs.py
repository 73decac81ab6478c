"""Removes libraries of compiled graphs that are damaged.

MLX compiles graphs with the system's compiler, and loads a library from then on wherever a file has
its name. One whose linker was killed, or that a full disk cut, would end every later load.
"""

import logging
import struct
import time
from pathlib import Path

_LIBRARIES = "mlx/*/cpu/*.so"
_ELF = b"\x7fELF"
# A 64-bit header of ELF: where the table of sections is, the size of an entry, and their number.
_HEADER_BYTES = 64
_TABLE_OFFSET = struct.Struct("<40xQ10xHH")
_TYPE = struct.Struct("<4xI")
# Another process may be writing it.
_LINKING_S = 3.0
_POLL_S = 0.1

log = logging.getLogger(__name__)


def remove_damaged(directory: Path) -> None:
    """Remove the damaged libraries in a directory for temporary files, which are compiled again."""
    for library in directory.glob(_LIBRARIES):
        try:
            if _becomes_whole(library):
                continue
            library.unlink()
        except OSError as error:
            log.warning("a compiled graph cannot be looked at: %s", error)
        else:
            log.warning("%s was damaged: MLX compiles it again", library.name)


def _becomes_whole(library: Path) -> bool:
    deadline = library.stat().st_mtime + _LINKING_S
    while not _is_whole(library):
        if not 0 < deadline - time.time() <= _LINKING_S:
            return False
        time.sleep(_POLL_S)
    return True


def _is_whole(library: Path) -> bool:
    """Tell whether a file is a library up to the last entry of its sections, which is its end."""
    with library.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if header[:4] != _ELF or len(header) < _HEADER_BYTES:
            # macOS has another form, and no such file is empty.
            return bool(header.strip(b"\0")) and header[:4] != _ELF
        offset, entry_bytes, count = _TABLE_OFFSET.unpack_from(header)
        file.seek(offset + entry_bytes * (count - 1))
        entry = file.read(entry_bytes)
    return len(entry) == entry_bytes and bool(_TYPE.unpack_from(entry)[0])
