from hypothesis import given
from hypothesis import strategies as st

from backend.sampling.grammar.vocabulary import ANY_CHARACTER, MAX_CODE_POINT, CharSet

code_points = st.one_of(
    st.integers(0, MAX_CODE_POINT), st.sampled_from([0, 0xD7FF, 0xD800, 0xDFFF, 0xE000])
)
pairs = st.tuples(code_points, code_points).map(lambda pair: (min(pair), max(pair)))
sets = st.lists(pairs, max_size=5).map(CharSet.of)
characters = code_points.map(chr)


@given(sets, sets, characters)
def test_operations_are_those_of_sets(one, other, character):
    is_character = not 0xD800 <= ord(character) <= 0xDFFF
    assert (character in one | other) == (character in one or character in other)
    assert (character in one & other) == (character in one and character in other)
    assert (character in ~one) == (is_character and character not in one)
    assert (character in ANY_CHARACTER) == is_character


@given(sets)
def test_equal_sets_are_equal_values(one):
    assert ~~one == one
    assert one | ~one == ANY_CHARACTER
    assert one & ~one == CharSet(())
    assert one & one == one | one == one


def test_neighbours_become_one_range():
    assert CharSet.of([(5, 7), (1, 2), (3, 3), (6, 9)]).ranges == ((1, 3), (5, 9))
    assert CharSet.single("a") == CharSet.of([(97, 97)])
    assert not CharSet.of([(0xD800, 0xDFFF)])
