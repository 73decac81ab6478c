from hypothesis import given, settings
from hypothesis import strategies as st

from backend.sampling.grammar.vocabulary import ANY_CHARACTER, Vocabulary


def vocabulary(pieces, **markers):
    return Vocabulary([*pieces, b"</s>"], markers=markers, eos_ids=[len(pieces)], size=512)


few = st.sampled_from("a~é߿ࠀ中😀")


@settings(max_examples=40)
@given(
    st.text(few, min_size=1, max_size=3),
    st.text(few | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=1),
)
def test_a_character_is_writable_if_its_bytes_are(text, character):
    known = vocabulary([text.encode()])
    is_writable = set(character.encode()) <= set(text.encode())
    assert (character in known.characters) == is_writable
    assert all(letter in known.characters for letter in text)


def test_a_byte_by_itself_is_no_character_unless_it_is_ascii():
    known = vocabulary([b"\xe9", b"a"])
    assert [character in known.characters for character in "aé"] == [True, False]


def test_with_all_bytes_every_character_is_writable():
    assert vocabulary([bytes([byte]) for byte in range(256)]).characters == ANY_CHARACTER


def test_with_odd_bytes_only_ascii_is_told_apart():
    known = vocabulary([b"a", bytes(range(0x80, 0xC0, 2)), bytes(range(0xC2, 0xF5))])
    assert "a" in known.characters
    assert "b" not in known.characters
    assert "é" in known.characters


def test_markers_and_ends_write_nothing():
    known = Vocabulary([b"a", b"<x>", b"</s>"], markers={"<x>": 1}, eos_ids=[2], size=3)
    assert "a" in known.characters
    assert "x" not in known.characters
    assert "/" not in known.characters


def test_a_token_has_an_id_by_its_text_or_by_itself():
    known = Vocabulary([b"a", b"<x>", b"</s>"], markers={"<x>": 1}, eos_ids=[2], size=10)
    assert known.token_id("<x>") == 1
    assert known.token_id("<y>") is None
    assert known.token_id("a") is None
    assert known.token_id(9) == 9
    assert known.token_id(10) is None


def test_a_mask_has_a_bit_for_every_logit():
    assert vocabulary([b"a"]).mask_words == 16
    assert Vocabulary([b"a", b"</s>"], markers={}, eos_ids=[1], size=33).mask_words == 2
