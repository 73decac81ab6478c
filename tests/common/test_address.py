import re
import socket
from pathlib import Path

import pytest

from common.address import (
    AddressError,
    completed,
    probe_port,
    probe_socket,
    socket_path,
    split_address,
)


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:7", ("127.0.0.1", 7)), ("[::1]:0", ("[::1]", 0))]
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("", "it has no port; write 127.0.0.1:50051"),
        ("host", "it has no port; write host:50051"),
        ("8080", "it has no host; write 127.0.0.1:8080"),
        (":7", "it has no host; write 127.0.0.1:7"),
        (f"host:{'9' * 5000}", f"'{'9' * 5000}' is not a port; write host:PORT, from 0 to 65535"),
        ("host:", "'' is not a port; write host:PORT, from 0 to 65535"),
        ("host:port", "'port' is not a port; write host:PORT, from 0 to 65535"),
        ("host:-1", "'-1' is not a port; write host:PORT, from 0 to 65535"),
        ("host:65536", "'65536' is not a port; write host:PORT, from 0 to 65535"),
        ("::1:7", "an IPv6 address needs brackets; write [::1]:7"),
        ("http://host:7", "it has a scheme; write host:7"),
        ("grpc://host:7/path", "it has a scheme; write host:7"),
        ("dns:///host:7", "it has a scheme; write host:7"),
    ],
)
def test_anything_else_is_refused_with_what_to_write_instead(address, advice):
    with pytest.raises(AddressError, match=re.escape(f"cannot listen on {address}: {advice}")):
        split_address(address)


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:/run/mlx.sock", Path("/run/mlx.sock")),
        ("unix:///run/mlx.sock", Path("/run/mlx.sock")),
        ("unix:mlx.sock", Path("mlx.sock")),
        ("127.0.0.1:7", None),
    ],
)
def test_a_unix_address_has_a_path(address, path):
    assert socket_path(address) == path


def test_a_path_that_systems_cut_is_refused():
    with pytest.raises(AddressError, match="its path has more than 103 bytes"):
        socket_path(f"unix:/{'é' * 52}")


def test_a_taken_port_is_told_with_what_helps():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match="Address already in use; stop the process"):
            probe_port(f"127.0.0.1:{port}", "127.0.0.1", port)


def test_a_socket_that_was_left_behind_is_no_hindrance(tmp_path):
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    probe_socket(f"unix:{path}", path)
    assert not path.exists()


def test_a_socket_that_somebody_listens_on_stays(tmp_path):
    path = tmp_path / "mlx.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(AddressError, match="another process listens there"):
            probe_socket(f"unix:{path}", path)
    assert path.is_socket()


def test_a_file_in_the_place_of_a_socket_stays(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("kept")
    with pytest.raises(AddressError, match="a file that is not a socket is in its place"):
        probe_socket(f"unix:{path}", path)
    assert path.read_text() == "kept"


def test_a_directory_that_is_not_there_is_told_in_the_systems_words(tmp_path):
    with pytest.raises(AddressError, match="No such file or directory"):
        probe_socket(f"unix:{tmp_path}/none/mlx.sock", tmp_path / "none" / "mlx.sock")


def test_a_socket_that_takes_no_streams_is_told_in_the_systems_words(tmp_path):
    path = tmp_path / "log.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(AddressError, match="Protocol wrong type for socket"):
            probe_socket(f"unix:{path}", path)
    assert path.is_socket()


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("localhost", "localhost:50051"),
        ("10.0.0.7", "10.0.0.7:50051"),
        ("h:7", "h:7"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_an_address_may_leave_out_our_port(given, whole):
    assert completed(given) == whole


@pytest.mark.parametrize("given", ["", "8080", "http://localhost:7", "h:99999", "::1", "a b"])
def test_a_malformed_address_is_not_completed(given):
    with pytest.raises(AddressError) as failure:
        completed(given)
    assert "write " in failure.value.problem
