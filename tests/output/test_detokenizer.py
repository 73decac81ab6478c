import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.output.reply import ByteDetokenizer, WindowDetokenizer

REPLACEMENT = "\ufffd"
PIECES = st.lists(
    st.one_of(st.binary(min_size=1, max_size=5), st.text(max_size=3).map(str.encode)), max_size=60
)


def read(detokenizer, count):
    return [*(detokenizer.decode(token_id) for token_id in range(count)), detokenizer.flush()]


def by_bytes(pieces):
    return read(ByteDetokenizer(pieces, trims_leading_space=False), len(pieces))


def by_window(pieces):
    def decode(ids):
        return b"".join(pieces[token_id] for token_id in ids).decode(errors="replace")

    return read(WindowDetokenizer(decode), len(pieces))


@pytest.mark.slow
@given(PIECES)
def test_byte_pieces_join_to_the_whole_without_what_is_no_text(pieces):
    whole = b"".join(pieces).decode(errors="ignore").replace(REPLACEMENT, "")
    assert "".join(by_bytes(pieces)) == whole


@given(PIECES)
def test_windows_join_to_the_whole_without_what_is_no_text(pieces):
    whole = b"".join(pieces).decode(errors="replace").replace(REPLACEMENT, "")
    assert "".join(by_window(pieces)) == whole


@given(st.text(max_size=40).map(str.encode))
def test_no_piece_holds_part_of_a_character(data):
    bytewise = [data[index : index + 1] for index in range(len(data))]
    for texts in (by_bytes(bytewise), by_window(bytewise)):
        assert "".join(texts) == data.decode().replace(REPLACEMENT, "")
        assert all(REPLACEMENT not in text for text in texts)


def test_a_character_comes_out_with_its_last_byte():
    assert by_bytes(["🤖".encode()[:3], "🤖!".encode()[3:]]) == ["", "🤖!", ""]
    assert by_window(["a🤖".encode()[:3], "🤖!".encode()[2:]]) == ["a", "🤖!", ""]


def test_a_hidden_or_unknown_token_has_no_text():
    detokenizer = ByteDetokenizer([b"a", b""], trims_leading_space=False)
    assert [detokenizer.decode(token_id) for token_id in (0, 1, 7, -1)] == ["a", "", "", ""]


def test_one_leading_space_is_trimmed_where_the_tokenizer_put_it():
    pieces = [b"", b" ", b" a", b"  b"]
    trimming = ByteDetokenizer(pieces, trims_leading_space=True)
    assert [trimming.decode(token_id) for token_id in (0, 3, 2)] == ["", " b", " a"]
    alone = ByteDetokenizer(pieces, trims_leading_space=True)
    assert [alone.decode(token_id) for token_id in (1, 2)] == ["", " a"]


def test_a_window_stays_small_however_long_the_reply():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return REPLACEMENT * len(ids)

    read(WindowDetokenizer(decode), 500)
    assert max(sizes) <= 16
    assert len(sizes) <= 2 * 500


def test_a_decoder_that_trims_the_start_of_its_window_does_no_harm():
    words = [f"▁w{index}" for index in range(50)]

    def decode(ids):
        return "".join(words[token_id] for token_id in ids).replace("▁", " ").removeprefix(" ")

    assert "".join(read(WindowDetokenizer(decode), 50)) == decode(range(50))
