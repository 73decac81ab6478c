"""Attention on CUDA, which makes no plan for each new pair of lengths, gives what MLX's gives."""

import mlx.core as mx
import pytest

from backend.model.device import Device, attend_unplanned

pytestmark = pytest.mark.mlx

ROWS, KV_HEADS, HEADS, HEAD_WIDTH = 3, 2, 6, 16
CUDA = {"compute_capability_major": 9, "total_memory": 2**36}


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


def test_cuda_alone_gets_it():
    cuda, metal = Device(), Device()
    cuda.adapt_to(CUDA)
    metal.adapt_to({"resource_limit": 499_000})
    assert (cuda.attend, cuda.attend_from) == (attend_unplanned, 0)
    assert (metal.attend, metal.attend_from) == (Device().attend, Device().attend_from)
