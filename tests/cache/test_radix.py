import gc
import weakref
from typing import ClassVar

import pytest
from eviction_order import least_recent, leaves
from pieces import Piece

from backend.cache.radix import RadixTree, TokenKey


class CountingKey(TokenKey):
    """Counts how often it is compared with a label."""

    __slots__ = ()
    comparisons: ClassVar[int] = 0

    def common_prefix(self, other, start=0):
        CountingKey.comparisons += 1
        return super().common_prefix(other, start)


def store(tree, *ids, sealed=False):
    """Insert the part of `ids` that the tree lacks."""
    key = TokenKey.from_ids(ids)
    start = tree.match(key).length
    node = tree.insert(key, start, Piece(ids[start:], sealed))
    tree.check()
    return node


def matched(tree, *ids):
    """Return the values of the match, each cut to the part that the match covers."""
    match = tree.match(TokenKey.from_ids(ids))
    return [node.value.tokens[:covered] for node, covered in match.spans()]


def labels(tree):
    return {tuple(node.key): node.value.tokens for node in tree.walk()}


@pytest.fixture
def tree():
    return RadixTree[Piece]()


def test_an_empty_tree_matches_nothing_and_has_nothing_to_evict(tree):
    match = tree.match(TokenKey.from_ids([1, 2]))
    assert (match.length, match.nodes, match.last) == (0, (), None)
    assert (len(tree), tree.tokens, least_recent(tree)) == (0, 0, None)
    tree.check()


def test_the_empty_key_matches_nothing(tree):
    store(tree, 1)
    assert matched(tree) == []


def test_a_key_of_one_token_is_found(tree):
    node = store(tree, 7)
    assert matched(tree, 7, 8) == [(7,)]
    assert (node.start, node.end) == (0, 1)


def test_the_whole_path_is_matched_by_its_own_key(tree):
    store(tree, 1, 2)
    leaf = store(tree, 1, 2, 3, 4)
    match = tree.match(leaf.key)
    assert match.length == 4
    assert match.last is leaf
    assert match.nodes == (leaf.parent, leaf)


def test_negative_ids_are_told_apart(tree):
    store(tree, 1, -5, -6, 2)
    store(tree, 1, -5, -7, 2)
    assert matched(tree, 1, -5, -7, 2, 3) == [(1, -5), (-7, 2)]
    assert matched(tree, 1, 5, 6) == [(1,)]


def test_a_match_ends_inside_a_label(tree):
    node = store(tree, 1, 2, 3, 4)
    match = tree.match(TokenKey.from_ids([1, 2, 9]))
    assert match.length == 2
    assert list(match.spans()) == [(node, 2)]
    assert len(tree) == 1


def test_a_diverging_key_shares_the_common_part(tree):
    lower = store(tree, 1, 2, 3, 4)
    store(tree, 1, 2, 8, 9)
    assert labels(tree) == {(1, 2): (1, 2), (1, 2, 3, 4): (3, 4), (1, 2, 8, 9): (8, 9)}
    assert tree.tokens == 6
    assert tuple(lower.key) == (1, 2, 3, 4)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_value_for_other_tokens_than_the_missing_ones_is_refused(tree, start):
    store(tree, 1, 2, 3)
    with pytest.raises(ValueError, match="holds 2 of 3 tokens"):
        tree.insert(TokenKey.from_ids([1, 2, 9]), start, Piece((9,)))


def test_a_key_that_is_already_held_is_refused(tree):
    store(tree, 1, 2, 3)
    with pytest.raises(ValueError, match="holds 2 of 2 tokens"):
        tree.insert(TokenKey.from_ids([1, 2]), 2, Piece(()))


def test_a_split_makes_an_upper_node_and_leaves_the_handle_below(tree):
    node = store(tree, 1, 2, 3)
    upper = tree.split_at(node, 1)
    tree.check()
    assert (upper.value.tokens, node.value.tokens) == ((1,), (2, 3))
    assert node.parent is upper
    assert tree.tokens == 3


@pytest.mark.parametrize("at", [-1, 0, 3, 4])
def test_a_split_that_leaves_a_part_empty_is_refused(tree, at):
    node = store(tree, 1, 2, 3)
    with pytest.raises(ValueError, match="cannot be split"):
        tree.split_at(node, at)
    assert labels(tree) == {(1, 2, 3): (1, 2, 3)}


def test_a_split_does_not_change_who_is_evicted_first(tree):
    older, newer = store(tree, 1, 1), store(tree, 2, 2)
    upper = tree.split_at(older, 1)
    assert list(leaves(tree)) == [older, newer]
    tree.remove(older)
    assert list(leaves(tree)) == [upper, newer]


def test_a_replaced_value_is_the_one_that_is_found(tree):
    node = store(tree, 1, 2)
    tree.replace(node, Piece((1, 2), sealed=True))
    assert tree.match(node.key).last.value.sealed


def test_a_removal_joins_the_parent_with_its_last_child(tree):
    survivor = store(tree, 1, 2, 3)
    leaf = store(tree, 1, 2, 9)
    assert tree.remove(leaf) == Piece((9,))
    tree.check()
    assert labels(tree) == {(1, 2, 3): (1, 2, 3)}
    assert tree.match(TokenKey.from_ids([1, 2, 3])).last is survivor


def test_a_join_is_as_recent_as_the_parent_was(tree):
    survivor, leaf = store(tree, 1, 2), store(tree, 1, 3)
    other = store(tree, 4)
    tree.touch(leaf)
    tree.remove(leaf)
    assert list(leaves(tree)) == [other, survivor]


def test_values_that_must_stay_two_are_not_joined(tree):
    upper = store(tree, 1, 2, sealed=True)
    lower, leaf = store(tree, 1, 2, 3), store(tree, 1, 2, 9)
    tree.remove(leaf)
    tree.check()
    assert lower.parent is upper
    assert len(tree) == 2


def test_a_parent_that_is_held_is_not_joined(tree):
    upper = store(tree, 1, 2)
    lower, leaf = store(tree, 1, 2, 3), store(tree, 1, 2, 9)
    tree.remove(leaf, skip={upper})
    tree.check()
    assert lower.parent is upper


def test_a_marked_parent_is_not_joined(tree):
    upper = store(tree, 1, 2)
    lower, leaf = store(tree, 1, 2, 3), store(tree, 1, 2, 9)
    tree.pin(upper)
    tree.remove(leaf)
    tree.check()
    assert lower.parent is upper


def test_a_node_with_children_cannot_be_removed(tree):
    upper = store(tree, 1)
    store(tree, 1, 2)
    with pytest.raises(ValueError, match="only a leaf"):
        tree.remove(upper)


def test_a_node_that_left_cannot_be_used(tree):
    leaf = store(tree, 1, 2)
    tree.remove(leaf)
    for use in (tree.touch, tree.pin, tree.remove, lambda node: tree.split_at(node, 1)):
        with pytest.raises(ValueError, match="no longer in the tree"):
            use(leaf)
    tree.unpin(leaf)
    tree.check()
    assert len(tree) == tree.tokens == 0


def test_a_node_that_was_joined_away_cannot_be_used(tree):
    survivor, leaf = store(tree, 1, 2), store(tree, 1, 3)
    upper = survivor.parent
    tree.remove(leaf)
    with pytest.raises(ValueError, match="no longer in the tree"):
        tree.touch(upper)


def test_a_removed_value_is_freed_at_once(tree):
    store(tree, 1, 2)
    reference = weakref.ref(store(tree, 1, 3).value)
    gc.disable()
    try:
        tree.remove(tree.match(TokenKey.from_ids([1, 3])).last)
        assert reference() is None
    finally:
        gc.enable()


def test_the_least_recent_leaf_is_evicted_first(tree):
    first, second, third = store(tree, 1), store(tree, 2), store(tree, 3)
    tree.touch(first)
    assert list(leaves(tree)) == [second, third, first]
    assert least_recent(tree) is second
    assert least_recent(tree, skip={second}) is third
    assert least_recent(tree, skip={first, second, third}) is None


def test_a_parent_is_evicted_after_its_children(tree):
    upper = store(tree, 1)
    lower, other = store(tree, 1, 2), store(tree, 3)
    evicted = []
    while (leaf := least_recent(tree)) is not None:
        evicted.append(leaf)
        tree.remove(leaf)
        tree.check()
    assert evicted == [lower, upper, other]


def test_a_match_does_not_make_anything_more_recent(tree):
    first, second = store(tree, 1, 2), store(tree, 3)
    tree.match(first.key)
    assert list(leaves(tree)) == [first, second]


def test_pinned_nodes_are_evicted_after_all_others(tree):
    kept = store(tree, 1)
    tree.pin(kept)
    below, other = store(tree, 1, 2), store(tree, 3)
    assert list(leaves(tree)) == [below, other]
    tree.remove(below)
    assert list(leaves(tree)) == [other, kept]
    tree.unpin(kept)
    tree.check()
    assert not kept.is_pinned


def test_what_is_above_a_pinned_node_is_pinned_until_its_last_mark_goes(tree):
    left, right = store(tree, 1, 2), store(tree, 1, 3)
    upper = left.parent
    tree.pin(left)
    tree.pin(right)
    tree.pin(right)
    tree.unpin(right)
    tree.check()
    assert upper.is_pinned
    tree.remove(left)
    tree.check()
    assert not any(node.is_pinned for node in tree.walk())


def test_a_split_of_a_pinned_node_keeps_both_parts(tree):
    node = store(tree, 1, 2, 3)
    tree.pin(node)
    upper = tree.split_at(node, 2)
    tree.check()
    assert upper.is_pinned
    assert not upper.is_pin
    assert node.is_pin


def test_a_chain_of_ten_thousand_nodes_needs_no_recursion(tree):
    ids = range(10_000)
    leaf = tree.insert(TokenKey.from_ids(ids), 0, Piece(tuple(ids)))
    while len(leaf.label) > 1:
        tree.split_at(leaf, 1)
    tree.pin(leaf)
    tree.check()
    assert leaf.key == TokenKey.from_ids(ids)
    assert len(tree.match(leaf.key).nodes) == len(tree) == len(list(tree.walk())) == len(ids)
    while (leaf := least_recent(tree)) is not None:
        tree.remove(leaf)
    tree.check()
    assert len(tree) == 0


def test_ten_thousand_entries_with_one_prefix_are_not_scanned(tree):
    prefix = tuple(range(300))
    for entry in range(10_000):
        key = TokenKey.from_ids((*prefix, entry, -entry))
        start = tree.match(key).length
        tree.insert(key, start, Piece(tuple(key[start:])))
    tree.check()
    assert len(tree) == 10_001
    assert tree.tokens == len(prefix) + 20_000
    CountingKey.comparisons = 0
    assert tree.match(CountingKey.from_ids((*prefix, 5_000, -5_000, 1))).length == 302
    assert CountingKey.comparisons == 2


def lose_a_token(tree):
    least_recent(tree).end -= 1


def hang_a_node_elsewhere(tree):
    leaf = least_recent(tree)
    leaf.parent.children[99] = leaf.parent.children.pop(leaf.label[0])


def empty_a_label(tree):
    least_recent(tree).label = TokenKey.from_ids([])


def count_a_pin_twice(tree):
    least_recent(tree).pins += 1


def forget_an_order(tree):
    least_recent(tree).unlink()


def mark_without_moving(tree):
    leaf = least_recent(tree)
    leaf.is_pin = True
    for node in leaf.lineage():
        node.pins += 1


def make_a_child_newer_than_its_parent(tree):
    leaf = least_recent(tree)
    leaf.unlink()
    leaf.place_after(leaf.parent)


def lengthen_a_label(tree):
    leaf = least_recent(tree)
    leaf.label = TokenKey.concat([leaf.label, leaf.label])
    leaf.end += len(leaf.label) // 2


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lose_a_token, "does not start where its parent ends"),
        (hang_a_node_elsewhere, "not where its first token says"),
        (empty_a_label, "without tokens"),
        (count_a_pin_twice, "pins of a node"),
        (forget_an_order, "hold different nodes"),
        (mark_without_moving, "order of the other class"),
        (make_a_child_newer_than_its_parent, "more recent than its parent"),
        (lengthen_a_label, "miscounted"),
    ],
)
def test_a_damaged_tree_does_not_pass_its_check(tree, damage, finding):
    store(tree, 1)
    store(tree, 1, 2, 3)
    damage(tree)
    with pytest.raises(AssertionError, match=finding):
        tree.check()
