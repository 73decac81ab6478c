"""Attention on CUDA agrees with MLX's: in one kernel, and without a plan for new lengths."""

import os
import subprocess
import sys

import mlx.core as mx
import pytest

from backend.model import cuda
from backend.model.cuda import attend_unplanned
from backend.model.device import Pieces

pytestmark = pytest.mark.mlx

ROWS, KV_HEADS, HEADS, HEAD_WIDTH = 3, 2, 6, 16


@pytest.fixture
def planned(monkeypatch):
    """The calls of MLX's own function."""
    upstream, calls = mx.fast.scaled_dot_product_attention, []

    def counted(*given, **named):
        calls.append(named)
        return upstream(*given, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)
    return calls


def inputs(width, positions, dtype=mx.float32):
    shapes = ((HEADS, width), (KV_HEADS, positions), (KV_HEADS, positions))
    return [
        mx.random.normal((ROWS, heads, tokens, HEAD_WIDTH), key=mx.random.key(i)).astype(dtype)
        for i, (heads, tokens) in enumerate(shapes)
    ]


def masks(width, positions):
    seen = mx.arange(positions) <= mx.arange(positions - width, positions)[:, None]
    lengths = mx.array([positions, positions - 3, positions - 5])[:, None, None, None]
    return {
        "all": None,
        "causal": "causal",
        "a matrix": seen,
        "a matrix of one head": seen[None],
        "for each row": mx.arange(positions) < lengths,
        "for each row and query": seen & (mx.arange(positions) < lengths),
        "one row": mx.arange(positions) < positions - 1,
        "sums": mx.where(seen, 0.0, -1e9),
        "nothing is seen": mx.zeros((ROWS, 1, width, positions), mx.bool_),
    }


@pytest.mark.parametrize("name", masks(1, 9))
@pytest.mark.parametrize(("width", "positions"), [(4, 4), (5, 12), (17, 40)])
def test_every_mask_gives_the_attention_of_mlx(planned, name, width, positions):
    arrays, mask = inputs(width, positions), masks(width, positions)[name]
    ours = attend_unplanned(*arrays, scale=0.3, mask=mask, sinks=None)
    assert not planned
    theirs = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask=mask)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_scores_of_bfloat16_are_as_exact_as_those_of_mlx():
    arrays = inputs(9, 300, mx.bfloat16)
    wide = [array.astype(mx.float32) for array in arrays]
    exact = mx.fast.scaled_dot_product_attention(*wide, scale=2.0, mask="causal")
    ours = attend_unplanned(*arrays, scale=2.0, mask="causal", sinks=None)
    theirs = mx.fast.scaled_dot_product_attention(*arrays, scale=2.0, mask="causal")
    assert ours.dtype == mx.bfloat16
    assert mx.abs(ours - exact).max() <= 1.5 * mx.abs(theirs - exact).max()


@pytest.mark.parametrize(
    ("width", "mask", "sinks"),
    [
        (1, "array", None),
        (3, "causal", None),
        (5, "causal", mx.zeros(HEADS)),
        (5, "of heads", None),
    ],
    ids=["one query", "few queries", "sinks", "a mask of each head"],
)
def test_mlx_computes_what_it_has_a_kernel_for_and_what_is_rare(planned, width, mask, sinks):
    of_heads = mx.ones((ROWS, HEADS, width, 20), mx.bool_)
    given = {"array": mx.ones((width, 20), mx.bool_), "of heads": of_heads}.get(mask, mask)
    attend_unplanned(*inputs(width, 20), scale=1.0, mask=given, sinks=sinks)
    assert len(planned) == 1


def test_a_large_pass_is_worth_a_plan(planned):
    attend_unplanned(*inputs(2000, 2000), scale=1.0, mask="causal", sinks=None)  # lazily
    assert len(planned) == 1


WIDTHS = (16, 64, 80, 96, 128, 192, 256)
needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a GPU of NVIDIA")


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (50, True)])
def test_one_kernel_attends_to_keys_in_several_arrays(dtype, width, window, has_sinks):
    queries, pieces = rows_in_pieces(width, dtype)
    sinks = drawn(HEADS, dtype=mx.float32) if has_sinks else None
    scale = width**-0.5
    found = cuda.attend_pieces(queries, pieces, scale=scale, window=window, sinks=sinks)
    for row in range(len(queries)):
        keys, values = seen_by(pieces, row, window)
        query = queries[row : row + 1].astype(mx.float32)
        expected = mx.fast.scaled_dot_product_attention(
            query, keys, values, scale=scale, sinks=sinks
        )
        bound = 1e-4 if dtype == mx.float32 else 2e-2
        assert mx.abs(found[row] - expected[0]).max().item() < bound


QUANTISED_MASKS = {
    "all": None,
    "causal": "causal",
    "for each row": mx.arange(40) < mx.array([40, 37, 35])[:, None, None, None],
}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("group_size", "width"), [(32, 96), (64, 64), (64, 256)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("mask", QUANTISED_MASKS.values(), ids=QUANTISED_MASKS)
def test_quantised_keys_are_attended_to_in_the_filled_part_of_buffers(
    bits, group_size, width, tokens, mask
):
    packing = {"group_size": group_size, "bits": bits}
    queries = drawn(ROWS, HEADS, tokens, width, dtype=mx.float32)
    whole = [drawn(ROWS, KV_HEADS, 64, width, dtype=mx.float32) for _ in "kv"]
    stored = [[part[..., :40, :] for part in mx.quantize(each, **packing)] for each in whole]
    scale = width**-0.5
    found = cuda.attend_dequantised(queries, *stored, scale, mask, bits)
    keys, values = (mx.dequantize(*parts, **packing) for parts in stored)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    bound = 2e-2 if mx.cuda.is_available() else 1e-5
    assert mx.abs(found - expected).max().item() < bound


@needs_cuda
@pytest.mark.parametrize("transpose", [True, False])
def test_products_with_a_part_of_a_quantised_buffer_are_refused_by_mlx(transpose):
    parts = [part[:, :100] for part in mx.quantize(drawn(2, 256, 128, dtype=mx.bfloat16))]
    other = drawn(2, 16, 128 if transpose else 100, dtype=mx.bfloat16)
    with pytest.raises(RuntimeError, match="No implementation"):
        mx.eval(mx.quantized_matmul(other, *parts, transpose=transpose))


ROUNDING = """
import mlx.core as mx
import numpy as np

one, other = mx.random.normal((256, 256)), mx.random.normal((256, 256))
exact = mx.array(np.asarray(one, np.float64) @ np.asarray(other, np.float64))
half = (one.astype(mx.float16) @ other.astype(mx.float16)).astype(mx.float32)
print((mx.abs(one @ other - exact).max() / mx.abs(half - exact).max()).item())
"""


@needs_cuda
def test_products_of_float32_are_rounded_as_those_of_float16_unless_the_environment_forbids_it():
    def error(setting):
        environment = os.environ | {"MLX_ENABLE_TF32": setting}
        command = [sys.executable, "-c", ROUNDING]
        return float(subprocess.check_output(command, env=environment, text=True))

    assert error("0") < 0.01 < error("1") < 10


def test_what_no_kernel_is_for_is_left_to_others():
    queries, pieces = rows_in_pieces(64, mx.float32)
    rest = {"scale": 1.0, "window": None, "sinks": None}
    wide = mx.concatenate([queries, queries], axis=2)
    odd, odd_pieces = rows_in_pieces(20, mx.float32)
    many = Pieces(pieces.sources * 40, pieces.table, pieces.longest, is_even=False)
    other = queries.astype(mx.bfloat16)
    for given in ((wide, pieces), (odd, odd_pieces), (queries, many), (other, pieces)):
        assert cuda.attend_pieces(*given, **rest) is None


def test_mlx_attends_to_few_positions_of_rows_of_one_length():
    queries, pieces = rows_in_pieces(64, mx.float32)
    even = Pieces(pieces.sources[:1], pieces.table, 100, is_even=True)
    assert cuda.attend_pieces(queries, even, scale=1.0, window=None, sinks=None) is None


@pytest.mark.skipif(mx.cuda.is_available(), reason="the kernels work on a GPU of NVIDIA")
def test_where_a_kernel_does_not_work_mlx_attends_and_the_log_says_so_once(caplog):
    queries, pieces = rows_in_pieces(64, mx.float32)
    for _ in range(2):
        given = {"scale": 1.0, "window": 7, "sinks": drawn(HEADS, dtype=mx.float32)}
        assert cuda.attend_pieces(queries, pieces, **given) is None
    (message,) = caplog.messages
    assert message.startswith("MLX attends instead of the kernel for")
    assert "No CUDA back-end" in message


def drawn(*shape, dtype):
    return mx.random.normal(shape).astype(dtype)


def rows_in_pieces(width, dtype):
    """Return the queries of three rows: one of a tail, two after a prefix of 700."""
    sources = [
        [drawn(places, KV_HEADS, positions, width, dtype=dtype) for _ in "kv"]
        for places, positions in ((3, 64), (1, 700))
    ]
    none = [0, 0, 0]
    table = [[[0, 0, 33], none], [[1, 0, 700], [0, 1, 1]], [[1, 0, 450], [0, 2, 20]]]
    pieces = Pieces(sources, mx.array(table, mx.int32), 701, is_even=False)
    return drawn(ROWS, HEADS, 1, width, dtype=dtype), pieces


def seen_by(pieces, row, window):
    """Return the keys and values of a row, in float32."""
    kept = [
        [array[place : place + 1, :, :tokens] for array in pieces.sources[source]]
        for source, place, tokens in pieces.table.tolist()[row]
    ]
    whole = [
        mx.concatenate(column, axis=2).astype(mx.float32) for column in zip(*kept, strict=True)
    ]
    return whole if window is None else [array[:, :, -window:] for array in whole]
