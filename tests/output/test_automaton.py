from hypothesis import given
from hypothesis import strategies as st

from backend.output.text import Automaton, Scan, Scanner

PATTERNS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)


def scan(patterns, chunks):
    """Return the text between the matches, the matches, and the text that is still held."""
    scanner = Scanner(Automaton(patterns))
    texts, matches = [""], []
    for chunk in chunks:
        rest = chunk
        while rest:
            step = scanner.scan(rest)
            texts[-1] += step.safe
            rest = step.rest
            if step.match:
                matches.append(step.match)
                texts.append("")
    return texts, matches, scanner.release()


def reference(patterns, text):
    """Do the same with the whole text: the match that ends first, of several the longest."""
    texts, matches, start = [], [], 0
    for end in range(len(text) + 1):
        if ending := [p for p in patterns if text[start:end].endswith(p)]:
            match = max(ending, key=len)
            texts.append(text[start : end - len(match)])
            matches.append(match)
            start = end
    return [*texts, text[start:]], matches


@given(PATTERNS, st.text("abc", max_size=40), st.integers(1, 4))
def test_matches_are_those_of_the_whole_text_however_it_is_cut(patterns, text, size):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    texts, matches, held = scan(patterns, chunks)
    texts[-1] += held
    assert (texts, matches) == reference(patterns, text)


@given(PATTERNS, st.text("abc", max_size=40))
def test_only_what_may_become_a_match_is_held(patterns, text):
    *_, held = scan(patterns, text)
    assert not held or any(pattern.startswith(held) for pattern in patterns)


def test_text_without_the_beginning_of_a_pattern_passes_at_once():
    scanner = Scanner(Automaton(["<think>"]))
    assert scanner.scan("plain") == Scan("plain")
    assert scanner.scan(" a < b ") == Scan(" a < b ")
    assert scanner.scan("<") == Scan("")
    assert scanner.scan("b") == Scan("<b")


def test_the_longest_of_several_matches_wins():
    assert Scanner(Automaton(["nd", "end"])).scan("the end.") == Scan("the ", "end", ".")


def test_a_match_is_not_lost_to_one_inside_a_longer_pattern_that_fails():
    scanner = Scanner(Automaton(["a", "abc", "b"], prefers_longer=True))
    assert scanner.scan("abx") == Scan("", "a", "bx")


def test_patterns_are_no_regular_expressions():
    scanner = Scanner(Automaton(["^-]", "\\.", "*"]))
    assert scanner.scan("-a.b\\.c") == Scan("-a.b", "\\.", "c")
    assert scanner.scan("^-]") == Scan("", "^-]")


def test_scanners_of_one_automaton_do_not_mix():
    automaton = Automaton(["abc"])
    first, second = Scanner(automaton), Scanner(automaton)
    assert first.scan("ab") == second.scan("a") == Scan("")
    assert second.scan("x") == Scan("ax")
    assert first.scan("c") == Scan("", "abc")
