"""The radix tree against a model that stores every prefix as a tuple and scans lists."""

import pytest
from eviction_order import least_recent, leaves
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pieces import Piece

from backend.cache.radix import RadixTree, TokenKey

KEYS = st.lists(st.sampled_from([-1, 0, 1]), max_size=12).map(tuple)
PICKS = st.integers(0, 1000)


class NaiveTree:
    """Nodes are the tuples at which they end, from the least to the most recent."""

    def __init__(self):
        self.ends = []
        self.marked = set()
        self.sealed = set()

    def prefixes(self):
        return {end[:length] for end in self.ends for length in range(1, len(end) + 1)}

    def match_length(self, key):
        stored = self.prefixes()
        return max(n for n in range(len(key) + 1) if n == 0 or key[:n] in stored)

    def start(self, end):
        return max((len(e) for e in self.ends if e != end and e == end[: len(e)]), default=0)

    def children(self, end):
        return [e for e in self.ends if e[: len(end)] == end and self.start(e) == len(end)]

    def is_pinned(self, end):
        return any(mark[: len(end)] == end for mark in self.marked)

    def eviction_order(self):
        return sorted(self.ends, key=self.is_pinned)

    def make_newest(self, path):
        for end in sorted(path, key=len, reverse=True):
            self.ends.remove(end)
            self.ends.append(end)

    def touch(self, end):
        self.make_newest([e for e in self.ends if e == end[: len(e)]])

    def insert(self, key, sealed):
        branch = key[: self.match_length(key)]
        if branch and branch not in self.ends:
            self.split(branch)
        self.ends.append(key)
        if sealed:
            self.sealed.add(key)
        self.touch(key)

    def split(self, upper):
        (lower,) = (e for e in self.ends if e[: len(upper)] == upper and self.start(e) < len(upper))
        self.ends.insert(self.ends.index(lower) + 1, upper)

    def unpin(self, end):
        before = [e for e in self.ends if self.is_pinned(e)]
        self.marked.discard(end)
        self.make_newest([e for e in before if not self.is_pinned(e)])

    def remove(self, leaf, skip):
        parent = leaf[: self.start(leaf)]
        self.unpin(leaf)
        self.ends.remove(leaf)
        self.sealed.discard(leaf)
        children = self.children(parent)
        if parent and len(children) == 1 and parent not in self.marked | self.sealed | skip:
            self.ends.remove(children[0])
            self.ends[self.ends.index(parent)] = children[0]


class RadixMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tree = RadixTree[Piece]()
        self.naive = NaiveTree()
        self.nodes = {}

    def pick(self, number):
        end = sorted(self.naive.ends)[number % len(self.naive.ends)]
        return end, self.nodes[end]

    @rule(key=KEYS, sealed=st.booleans())
    def insert(self, key, sealed):
        start = self.naive.match_length(key)
        if start == len(key):
            return
        node = self.tree.insert(TokenKey.from_ids(key), start, Piece(key[start:], sealed))
        self.naive.insert(key, sealed)
        self.nodes[key] = node
        if node.parent is not None:
            self.nodes.setdefault(key[:start], node.parent)

    @rule(key=KEYS)
    def match(self, key):
        found = self.tree.match(TokenKey.from_ids(key))
        assert found.length == self.naive.match_length(key)
        covered = [node.value.tokens[:count] for node, count in found.spans()]
        assert sum(covered, ()) == key[: found.length]
        assert all(covered)

    @precondition(lambda self: self.nodes)
    @rule(number=PICKS)
    def touch(self, number):
        end, node = self.pick(number)
        self.tree.touch(node)
        self.naive.touch(end)

    @precondition(lambda self: self.nodes)
    @rule(number=PICKS)
    def pin(self, number):
        end, node = self.pick(number)
        self.tree.pin(node)
        self.naive.marked.add(end)
        self.naive.touch(end)

    @precondition(lambda self: self.nodes)
    @rule(number=PICKS)
    def unpin(self, number):
        end, node = self.pick(number)
        self.tree.unpin(node)
        self.naive.unpin(end)

    @precondition(lambda self: self.nodes)
    @rule(number=PICKS, at=st.integers(1, 11))
    def split(self, number, at):
        end, node = self.pick(number)
        start = self.naive.start(end)
        if start + at >= len(end):
            return
        upper = end[: start + at]
        self.nodes[upper] = self.tree.split_at(node, at)
        self.naive.split(upper)

    @precondition(lambda self: self.nodes)
    @rule(number=PICKS, sealed=st.booleans())
    def replace(self, number, sealed):
        end, node = self.pick(number)
        self.tree.replace(node, Piece(node.value.tokens, sealed))
        (self.naive.sealed.add if sealed else self.naive.sealed.discard)(end)

    @precondition(lambda self: self.nodes)
    @rule(number=PICKS, held=st.sets(KEYS, max_size=3))
    def remove(self, number, held):
        end, node = self.pick(number)
        if self.naive.children(end):
            self.refuses_to_remove(node)
        else:
            self.take_out(end, held)

    @precondition(lambda self: self.nodes)
    @rule(skipped=st.sets(PICKS, max_size=2))
    def evict(self, skipped):
        skip = {self.pick(number)[0] for number in skipped}
        leaf = least_recent(self.tree, {self.nodes[end] for end in skip})
        order = [end for end in self.naive.eviction_order() if not self.naive.children(end)]
        expected = next((end for end in order if end not in skip), None)
        assert leaf is (None if expected is None else self.nodes[expected])
        if expected is not None:
            self.take_out(expected, skip)

    def refuses_to_remove(self, node):
        try:
            self.tree.remove(node)
        except ValueError:
            return
        raise AssertionError("a node with children was removed")

    def take_out(self, end, held):
        held = held & set(self.naive.ends)
        start = self.naive.start(end)
        value = self.tree.remove(self.nodes[end], {self.nodes[e] for e in held})
        assert value.tokens == end[start:]
        self.naive.remove(end, held)
        self.nodes = {end: self.nodes[end] for end in self.naive.ends}

    @invariant()
    def links_and_orders_hold(self):
        self.tree.check()

    @invariant()
    def every_node_ends_where_its_handle_was_given(self):
        assert set(self.tree.walk()) == set(self.nodes.values())
        assert set(self.nodes) == set(self.naive.ends)
        assert all(tuple(node.key) == end for end, node in self.nodes.items())

    @invariant()
    def every_value_describes_the_tokens_of_its_node(self):
        for end, node in self.nodes.items():
            assert node.value == Piece(end[self.naive.start(end) :], end in self.naive.sealed)
            assert node.is_pinned == self.naive.is_pinned(end)
        assert self.tree.tokens == len(self.naive.prefixes())
        assert len(self.tree) == len(self.naive.ends)

    @invariant()
    def leaves_come_in_eviction_order(self):
        expected = [end for end in self.naive.eviction_order() if not self.naive.children(end)]
        assert [tuple(leaf.key) for leaf in leaves(self.tree)] == expected


RadixMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestRadixTree = pytest.mark.slow(RadixMachine.TestCase)
