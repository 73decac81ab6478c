"""Child processes that the kernel ends together with this one.

A child that asks for a signal at its parent's death can be stopped before it has asked. So the
parent arranges it too: the child inherits one end of a pipe whose other end closes with the
parent, and fcntl(2) makes that send SIGKILL. Nothing is ever written.
"""

import fcntl
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

Process: TypeAlias = subprocess.Popen[bytes]


def tied(start: Callable[[list[int]], Process]) -> Process:
    """Start a child that ends with this process, or when its `Popen` is garbage-collected.

    Where the kernel lacks this (macOS), the child has to watch its parent itself.

    Args:
        start: Starts the child, which inherits these descriptors but need not use them.
    """
    if sys.platform != "linux":
        return start([])
    theirs, ours = os.pipe()
    with ExitStack() as cleanup:
        cleanup.callback(os.close, theirs)
        with ExitStack() as unless_started:
            unless_started.callback(os.close, ours)
            process = start([theirs])
            unless_started.pop_all()
        weakref.finalize(process, os.close, ours)
        fcntl.fcntl(theirs, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
    return process
