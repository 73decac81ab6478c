from hypothesis import given
from hypothesis import strategies as st

from backend.output.reply import StopMatcher


def run(stop_strings, chunks):
    matcher = StopMatcher(stop_strings)
    sent = []
    for chunk in chunks:
        text, has_matched = matcher.pass_text(chunk)
        sent.append(text)
        if has_matched:
            return "".join(sent), True
    return "".join([*sent, matcher.pass_last()]), False


@given(
    st.lists(st.text("ab🤖", min_size=1, max_size=4), max_size=4),
    st.text("abc🤖", max_size=30),
    st.integers(1, 3),
)
def test_nothing_of_a_match_is_sent_and_nothing_else_is_lost(stops, text, size):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    sent, has_matched = run(stops, chunks)
    assert has_matched == any(stop in text for stop in stops)
    assert text.startswith(sent)
    assert has_matched or sent == text
    assert not any(stop in sent for stop in stops)


def test_the_earliest_of_several_wins():
    assert run(["END", "\n\n"], ["one\n", "\ntwo END"]) == ("one", True)


def test_overlapping_beginnings_are_found():
    assert run(["aab"], "aaaab!") == ("aa", True)


def test_what_never_became_a_stop_string_is_handed_out():
    assert run(["STOP"], ["ST", "ART"]) == ("START", False)
    assert run(["STOP"], ["STO"]) == ("STO", False)


def test_without_stop_strings_nothing_is_held():
    assert StopMatcher(()).pass_text("text") == ("text", False)
