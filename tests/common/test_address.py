import pytest

from common.address import AddressError, split_address


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:7", ("127.0.0.1", 7)), ("[::1]:0", ("[::1]", 0))]
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "host", "host:", ":7", "host:port", "host:-1", "h:65536"])
def test_anything_else_is_refused_by_name(address):
    with pytest.raises(AddressError, match=f"cannot listen on {address}: "):
        split_address(address)
