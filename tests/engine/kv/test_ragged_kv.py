"""Rows of a batch that keep their own lengths, against each row by itself."""

from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.cache import KVCache

from backend.cache.kv import Part, RowKV
from backend.engine.kv.batch_caches import _joining
from backend.engine.kv.layer import RaggedKV, Window, attend_row, install
from backend.engine.kv.ledger import Ledger
from backend.engine.kv.spans import Column
from backend.model.cuda import attend_dequantised
from backend.model.device import DEVICE
from benchmarks.cases import ragged_steps

pytestmark = pytest.mark.mlx

# Tokens of nodes, and the paths of rows: nodes, and how many of their tokens.
NODES = (30, 17, 9)
PATHS = st.sampled_from(
    [(), (), ((0, 30),), ((0, 21),), ((0, 30), (1, 17)), ((0, 30), (1, 5)), ((0, 30), (2, 9))]
)
KV_HEADS, HEADS, WIDTH, VALUE_WIDTH = 2, 4, 8, 4
SCALE = WIDTH**-0.5


def drawn(rng, heads, count, width):
    return rng.standard_normal((heads, count, width)).astype(np.float32)


def attention(queries, keys, values, *, window=None, sinks=None):
    """Attention of one row in NumPy; the queries are those of its last positions."""
    heads, count, _ = queries.shape
    keys, values = (np.repeat(a, heads // KV_HEADS, axis=0) for a in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) * SCALE
    total = keys.shape[1]
    at = np.arange(total - count, total)[:, None]
    seen = np.arange(total) <= at
    if window is not None:
        seen &= np.arange(total) > at - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.tile(sinks[:, None, None], (1, count, 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., :total] @ values


def attention_in_pieces(queries, pieces, *, scale, window, sinks):
    """Compute the attention of a single query of each row as a device does, in NumPy."""
    assert scale == SCALE
    seen = [pieces_of(pieces, row) for row in range(len(queries))]
    lengths = [keys.shape[1] for keys, _ in seen]
    assert pieces.longest == max(lengths)
    assert not pieces.is_even or len(set(lengths)) == 1
    outputs = []
    for query, (keys, values) in zip(np.array(queries), seen, strict=True):
        own = slice(None) if window is None else slice(-window, None)
        given = None if sinks is None else np.array(sinks)
        outputs.append(attention(query, keys[:, own], values[:, own], sinks=given))
    return mx.array(np.stack(outputs))


def pieces_of(pieces, row):
    """Return the keys and the values of a row, in order."""
    kept = [
        [np.array(array)[place, :, :tokens] for array in pieces.sources[source]]
        for source, place, tokens in pieces.table.tolist()[row]
    ]
    return [np.concatenate(column, axis=1) for column in zip(*kept, strict=True)]


class Rows(RuleBasedStateMachine):
    """Rows join, leave, take tokens and give some back; every output is that of the row alone."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        overhead=st.sampled_from([0.0, 5.0, 60.0, 1e9]),
        kernel=st.sampled_from([None, attention_in_pieces]),
    )
    def start(self, seed, overhead, kernel):
        DEVICE.attend_pieces = kernel
        self.rng = np.random.default_rng(seed)
        self.ledger = Ledger(overhead)
        self.layers = [RaggedKV(self.ledger, RowKV()) for _ in range(2)]
        # Per layer and node: keys and values in the prompt cache.
        self.nodes = [[self.node(tokens) for tokens in NODES] for _ in self.layers]
        # Per row and layer: keys and values.
        self.rows: list[list[tuple[np.ndarray, np.ndarray]]] = []

    @rule(
        joining=st.lists(st.tuples(st.integers(0, 70), PATHS), max_size=3),
        leaving=st.sets(st.integers(0, 7), max_size=3),
    )
    def regroup(self, joining, leaving):
        staying = [row for row in range(len(self.rows)) if row not in leaving]
        arrivals = [[self.arrival(*row, layer) for layer in range(2)] for row in joining]
        before = {
            group: layer.buffers.get(group)
            for layer in self.layers[:1]
            for group in self.ledger.groups
        }
        recipes = self.ledger.regroup(staying, [_joining(caches) for caches in arrivals])
        for index, layer in enumerate(self.layers):
            layer.regroup(recipes, [caches[index] for caches in arrivals])
        joined = [[arrays_of(cache) for cache in caches] for caches in arrivals]
        self.rows = [self.rows[row] for row in staying] + joined
        for recipe in recipes:
            if recipe.is_kept:
                assert self.layers[0].buffers.get(recipe.group) is before[recipe.group]

    @precondition(lambda self: self.rows)
    @rule(
        width=st.integers(1, 4),
        window=st.sampled_from([None, None, 7]),
        has_sinks=st.booleans(),
        data=st.data(),
    )
    def step(self, width, window, has_sinks, data):
        self.ledger.begin(width)
        self.compute(
            [width] * len(self.rows), window, np.stack, lambda got, row: got[row], has_sinks
        )
        self.attend_alone(data.draw(st.integers(0, len(self.rows) - 1)), width)
        self.give_back([data.draw(st.integers(0, width)) for _ in self.rows])

    @precondition(lambda self: len(self.rows) > 1)
    @rule(window=st.sampled_from([None, None, 7]), has_sinks=st.booleans(), data=st.data())
    def packed_step(self, window, has_sinks, data):
        counts = [data.draw(st.integers(1, 5)) for _ in self.rows]
        firsts = np.cumsum([0, *counts])

        def in_column(parts):
            return np.concatenate([part.swapaxes(0, 1)[:, :, None] for part in parts])

        def of_row(got, row):
            return got[firsts[row] : firsts[row + 1], :, 0].swapaxes(0, 1)

        self.ledger.begin_packed(Column(counts))
        self.compute(counts, window, in_column, of_row, has_sinks)
        self.give_back([data.draw(st.integers(0, count)) for count in counts])

    def compute(self, counts, window, arranged, of_row, has_sinks):
        """Feed tokens to each row in every layer, and compare with the rows alone.

        Args:
            counts: Of the tokens of each row.
            window: Of the layers.
            arranged: Returns the arrays of the rows as the network has them.
            of_row: Returns the part of a row in an output of the network.
            has_sinks: Whether the layers have sinks.
        """
        sinks = self.rng.standard_normal(HEADS).astype(np.float32) if has_sinks else None
        for index, layer in enumerate(self.layers):
            new = [self.drawn(count) for count in counts]
            before = layer.offset
            keys, values = (mx.array(arranged(part)) for part in zip(*new, strict=True))
            layer.update_and_fetch(keys, values)
            assert (layer.offset - before).tolist() == [keys.shape[2]] * len(keys)
            queries = [drawn(self.rng, HEADS, count, WIDTH) for count in counts]
            mask = layer.make_mask(keys.shape[2], window_size=window)
            assert (mask is None) == (window is None)
            assert mask is None or isinstance(mask, Window)
            scores = None if sinks is None else mx.array(sinks)
            got = np.array(layer.attend(mx.array(arranged(queries)), SCALE, mask, scores))
            for row, (more_keys, more_values) in enumerate(new):
                old_keys, old_values = self.rows[row][index]
                grown = (
                    np.concatenate([old_keys, more_keys], 1),
                    np.concatenate([old_values, more_values], 1),
                )
                self.rows[row][index] = grown
                expected = attention(queries[row], *grown, window=window, sinks=sinks)
                np.testing.assert_allclose(of_row(got, row), expected, atol=2e-5)
        self.ledger.advance()

    def give_back(self, counts):
        self.ledger.give_back(counts)
        for row, count in zip(self.rows, counts, strict=True):
            row[:] = [(k[:, : k.shape[1] - count], v[:, : v.shape[1] - count]) for k, v in row]

    def teardown(self):
        DEVICE.attend_pieces = None

    @invariant()
    def every_row_can_be_taken_out(self):
        for number, row in enumerate(getattr(self, "rows", [])):
            for layer, (keys, values) in zip(self.layers, row, strict=True):
                cache = layer.extract(number)
                assert cache.offset in (keys.shape[1], 0)
                if cache.offset:
                    got = arrays_of(cache)
                    np.testing.assert_array_equal(got[0], keys)
                    np.testing.assert_array_equal(got[1], values)

    def attend_alone(self, number, width):
        """Read a row that has been taken out, by part."""
        cache = self.layers[0].extract(number)
        queries = drawn(self.rng, HEADS, width, WIDTH)
        for window in (None, 5, 40) if cache.parts else (None,):
            expected = attention(queries, *self.rows[number][0], window=window)
            mask = None if window is None else mask_of_window(cache, width, window)
            got = attend_row(cache, mx.array(queries)[None], SCALE, mask, None)[0]
            np.testing.assert_allclose(np.array(got), expected, atol=2e-5)

    def drawn(self, count):
        return drawn(self.rng, KV_HEADS, count, WIDTH), drawn(
            self.rng, KV_HEADS, count, VALUE_WIDTH
        )

    def node(self, tokens):
        return tuple(mx.array(array)[None] for array in self.drawn(tokens))

    def arrival(self, tail, path, layer):
        cache = RowKV()
        cache.parts = tuple(Part(self.nodes[layer][node], tokens) for node, tokens in path)
        if tail:
            cache.update_and_fetch(*(mx.array(array)[None] for array in self.drawn(tail)))
        return cache


def mask_of_window(cache, width, window):
    """Return the mask that a cache gives before the latest positions are in it."""
    before = RowKV()
    before.parts, before.tail = cache.parts, cache.tail - width
    return before.make_mask(width, window_size=window)


def arrays_of(cache):
    if cache.empty():
        empty = np.zeros((KV_HEADS, 0, WIDTH)), np.zeros((KV_HEADS, 0, VALUE_WIDTH))
        return tuple(array.astype(np.float32) for array in empty)
    return tuple(np.array(array[0]) for array in cache.joined())


def test_a_row_without_parts_is_a_cache_of_mlx_lm():
    rng = np.random.default_rng(3)
    ours, upstream = RowKV(), KVCache()
    for width in (5, 1, 300, 1, 1):
        assert ours.offset == upstream.offset
        options = {"return_array": True, "window_size": None}
        masks = [cache.make_mask(width, **options) for cache in (ours, upstream)]
        assert (masks[0] is None) == (masks[1] is None)
        new = [mx.array(drawn(rng, KV_HEADS, width, n))[None] for n in (WIDTH, VALUE_WIDTH)]
        fetched = ours.update_and_fetch(*new), upstream.update_and_fetch(*new)
        assert all(mx.array_equal(*pair) for pair in zip(*fetched, strict=True))
    assert ours.nbytes == upstream.nbytes
    assert ours.trim(2) == upstream.trim(2)
    assert ours.offset == upstream.offset


def test_parts_that_are_referred_to_take_the_place_of_what_the_row_holds():
    rng = np.random.default_rng(4)
    row = RowKV()
    new = [mx.array(drawn(rng, KV_HEADS, 40, n))[None] for n in (WIDTH, VALUE_WIDTH)]
    row.update_and_fetch(*new)
    parts = [Part(row.slices(0, 25), 25), Part(row.slices(25, 40), 9)]
    row.refer(parts)
    assert (row.offset, row.shared, row.tail) == (40, 34, 6)
    for array, expected in zip(row.joined(), new, strict=True):
        assert mx.array_equal(array, expected)
    tail = 6 * KV_HEADS * (WIDTH + VALUE_WIDTH) * 4
    assert row.nbytes == tail


def test_a_rank_of_a_pipeline_can_let_what_it_has_sent_be_part_of_the_keys():
    """Upstream contract: `cache.keys = mx.depends(cache.keys, sent)` in models that pipeline."""
    ledger = Ledger(0.0)
    layer = RaggedKV(ledger, RowKV())
    layer.regroup(ledger.regroup([], [_joining([RowKV()])] * 2), [RowKV(), RowKV()])
    ledger.begin(1)
    layer.update_and_fetch(mx.ones((2, 1, 1, 4)), mx.ones((2, 1, 1, 4)))
    layer.keys = mx.depends(layer.keys, mx.zeros(3))
    ledger.advance()
    assert all(
        mx.array_equal(layer.extract(row).joined()[0], mx.ones((1, 1, 1, 4))) for row in (0, 1)
    )


TestRows = pytest.mark.mlx(Rows.TestCase)
TestRows.settings = settings(max_examples=40, stateful_step_count=15)


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_benchmark_of_steps_has_rows_on_prefixes(networks, is_apart):
    network = networks("llama")
    rows, mix = ragged_steps.Rows(network), ragged_steps.Mix(9, (2, 3), is_apart=is_apart)
    for side in (ragged_steps.Ours, ragged_steps.Upstream):
        step_ms, nbytes = side(network, rows).measure(mix)
        assert step_ms > 0
        assert nbytes >= sum(mix.own) * rows.bytes_per_token


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_row_attends_as_its_device_does(networks, bits):
    """MLX's products with a part of a quantised buffer, which CUDA lacks, are not needed."""
    network, called = networks("llama_wide"), []
    install()

    def logits():
        caches = [KVCache().to_quantized(group_size=32, bits=bits) for _ in network.layers]
        prompts = ([list(range(40))], [[5]])
        return mx.concatenate([network(mx.array(t), cache=caches) for t in prompts], axis=1)

    def attend(*given):
        called.append(given)
        return attend_dequantised(*given)

    expected = logits()
    with quantised_attention(attend):
        assert mx.allclose(logits(), expected, atol=1e-4)
    assert len(called) == 2 * len(network.layers)


@contextmanager
def quantised_attention(attend):
    before, DEVICE.attend_quantised = DEVICE.attend_quantised, attend
    yield
    DEVICE.attend_quantised = before
