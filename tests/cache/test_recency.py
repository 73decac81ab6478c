import pytest

from backend.cache.radix import Link, RecencyList


def test_an_item_moves_to_the_end_wherever_it_stood():
    items, (first, second, third) = RecencyList[Link](), (Link(), Link(), Link())
    for item in (first, second, third, first):
        items.append(item)
    assert list(items) == [second, third, first]


def test_an_item_that_moves_to_another_list_leaves_the_first():
    left, right, item = RecencyList[Link](), RecencyList[Link](), Link()
    left.append(item)
    right.append(item)
    assert (list(left), list(right)) == ([], [item])


def test_an_item_stands_next_to_its_neighbour():
    items, neighbour, older, newer = RecencyList[Link](), Link(), Link(), Link()
    items.append(neighbour)
    older.place_before(neighbour)
    newer.place_after(neighbour)
    assert list(items) == [older, neighbour, newer]


def test_an_item_that_left_is_in_no_list():
    items, item = RecencyList[Link](), Link()
    items.append(item)
    item.unlink()
    item.unlink()
    assert not item.is_linked
    assert list(items) == []
    with pytest.raises(ValueError, match="stands in no list"):
        Link().place_after(item)
