"""`HOST:PORT` addresses that a process listens on."""

MAX_PORT = 65535


class AddressError(Exception):
    """The process cannot listen where it was told to."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}")


def split_address(address: str) -> tuple[str, int]:
    """Return the host, in brackets when it is an IPv6 address, and the port.

    Raises:
        AddressError: It is malformed.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise AddressError(address, "it is not HOST:PORT")
    if int(port) > MAX_PORT:
        raise AddressError(address, f"the port is above {MAX_PORT}")
    return host, int(port)
