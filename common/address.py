"""Listening addresses: `HOST:PORT`, or `unix:PATH` for a socket file.

An address that cannot be used raises `AddressError`, whose message says why.
"""

import errno
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

MAX_PORT = 65535
# The lowest limit of common systems, without the terminating null byte.
MAX_SOCKET_PATH_BYTES = 103

_UNIX = re.compile(r"unix:(?://(?=/))?(.+)", re.DOTALL)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+(.*)", re.DOTALL)
_PROBE_TIMEOUT_S = 1.0
# This backend's own, unless another is given.
DEFAULT_PORT = 50051


class AddressError(Exception):
    """The process cannot listen on the address that it was given.

    Attributes:
        problem: The reason, without the address.
    """

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}")
        self.problem = problem


def split_address(address: str) -> tuple[str, int]:
    """Return the host (in brackets if it is an IPv6 address) and the port of `HOST:PORT`."""
    if scheme := _SCHEME.fullmatch(address):
        raise AddressError(address, f"it has a scheme; write {scheme[1].split('/')[0]}")
    host, colon, port = address.rpartition(":")
    if not colon:
        raise AddressError(address, _without_colon(address))
    if not host:
        raise AddressError(address, f"it has no host; write 127.0.0.1:{port or DEFAULT_PORT}")
    if ":" in host and not host.startswith("["):
        raise AddressError(address, f"an IPv6 address needs brackets; write [{host}]:{port}")
    is_number = port.isascii() and port.isdecimal() and len(port) <= len(str(MAX_PORT))
    if not (is_number and int(port) <= MAX_PORT):
        problem = f"{port!r} is not a port; write {host}:PORT, from 0 to {MAX_PORT}"
        raise AddressError(address, problem)
    return host, int(port)


def completed(address: str) -> str:
    """Return an address with the default port if it has none."""
    if socket_path(address) is not None:
        return address
    is_bare = address and not address.isdecimal() and not re.search(r"[:/\s]", address)
    whole = f"{address}:{DEFAULT_PORT}" if is_bare else address
    split_address(whole)
    return whole


def socket_path(address: str) -> Path | None:
    """Return the path of `unix:PATH` or `unix:///PATH`, or `None` for an address with a port."""
    match = _UNIX.fullmatch(address)
    if match is None:
        return None
    if len(match[1].encode()) > MAX_SOCKET_PATH_BYTES:
        raise AddressError(address, f"its path has more than {MAX_SOCKET_PATH_BYTES} bytes")
    return Path(match[1])


def grpc_target(address: str) -> str:
    """Return an address as gRPC reads it: a path is a part of a URI, with `%`, `?` and `#`."""
    path = socket_path(address)
    return address if path is None else f"unix:{quote(str(path))}"


def bind_problem(error: OSError) -> str:
    """Return why an address cannot be bound, with a remedy where one is known."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return f"{reason}; stop the process that listens there, or use another port (0: any)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{reason}; this machine has no such address, and 0.0.0.0 means all of its addresses"
    if error.errno == errno.EACCES:
        return f"{reason}; ports below 1024 are the administrator's on most systems"
    return reason


def probe_port(address: str, host: str, port: int) -> None:
    """Bind an address and release it again."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise AddressError(address, bind_problem(error)) from None


def probe_socket(address: str, path: Path) -> None:
    """Make sure that a socket can be made at a path; a stale socket file does not count.

    Raises:
        AddressError: Another process listens there, the path is not a socket, or the directory
            does not accept one.
    """
    try:
        if path.exists():
            _remove_stale(address, path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        raise AddressError(address, error.strerror or str(error)) from None


def removal(address: str) -> Callable[[], None]:
    """Return a function that removes the socket file of an address, unless it is another one."""
    path = socket_path(address)
    if path is None:
        return lambda: None
    own = path.stat()

    def remove() -> None:
        if os.path.samestat(own, path.stat()):
            path.unlink()

    return remove


def _remove_stale(address: str, path: Path) -> None:
    if not path.is_socket():
        raise AddressError(address, "a file that is not a socket is in its place")
    if _listens(path):
        raise AddressError(address, "another process listens there; use another path")
    path.unlink()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(_PROBE_TIMEOUT_S)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            # Its backlog is full.
            return True
    return True


def _without_colon(address: str) -> str:
    if address.isdecimal():
        return f"it has no host; write 127.0.0.1:{address}"
    return f"it has no port; write {address or '127.0.0.1'}:{DEFAULT_PORT}"
