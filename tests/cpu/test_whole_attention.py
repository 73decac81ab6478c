"""Attention over whole keys is that of MLX, also where it is computed in pieces."""

import math
import threading

import mlx.core as mx
import pytest

from backend.cpu import attention_kernel, exponentials, shared_work, whole_attention
from backend.cpu.install import install
from backend.cpu.kernels import kernels
from backend.cpu.whole_attention import attend_whole
from backend.engine.kv import layer as attention
from backend.model.device import Device

pytestmark = pytest.mark.mlx

HEADS, KV_HEADS, POSITIONS, WIDTH, HEAD_WIDTH, VALUE_WIDTH = 4, 2, 50, 11, 16, 8
SCALE = HEAD_WIDTH**-0.5


@pytest.fixture
def sized(monkeypatch):
    """Return a function that sets attributes of a module by name."""

    def change(module=whole_attention, **sizes):
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)

    return change


@pytest.fixture(autouse=True)
def pieces(sized):
    """However few scores there are, as many as those of three tokens are a piece."""
    sized(exponentials, LEAST_NUMBERS=0)
    sized(PIECE_SCORES=3 * HEADS * POSITIONS, LEAST_OF_KERNEL=10**6)


@pytest.fixture
def in_pieces(monkeypatch, sized):
    """Refuse MLX's own function."""
    monkeypatch.setattr(whole_attention.mx, "fast", None)
    return sized


@pytest.fixture
def in_blocks(in_pieces):
    """Refuse pieces as well; blocks are small, and none ends where another does."""
    in_pieces(LEAST_SCORES=0, LEAST_QUERIES=1, ROWS=7, COLUMNS=9, over_own=None)


@pytest.fixture
def by_numpy(sized):
    """Refuse the kernel."""
    sized(attention_kernel, kernels=lambda: None)


@pytest.fixture
def by_kernel(sized):
    """Refuse NumPy's tiles; no part of the positions ends where a tile of the kernel does."""
    if kernels() is None:
        pytest.skip("there is no C compiler")
    sized(product=None)
    sized(attention_kernel, CHUNK=18, MOST_QUERIES=10**6)


@pytest.fixture
def in_tiles(in_pieces, by_numpy):  # noqa: ARG001 (a fixture)
    """Refuse pieces as well; a tile is that of one head, and none ends where the keys do."""
    in_pieces(LEAST_TILED=0, TILE_SCORES=60, LEAST_POSITIONS=7, LEAST_TILE_SCORES=0, over_own=None)


@pytest.fixture
def in_kernel(in_pieces, by_kernel):  # noqa: ARG001 (a fixture)
    """Refuse pieces as well."""
    in_pieces(LEAST_TILED=0, over_own=None)


def arrays(rows, width=WIDTH, dtype=mx.float32):
    mx.random.seed(5)
    queries = mx.random.normal((rows, HEADS, width, HEAD_WIDTH)) * 3
    keys = mx.random.normal((rows, KV_HEADS, POSITIONS, HEAD_WIDTH))
    values = mx.random.normal((rows, KV_HEADS, POSITIONS, VALUE_WIDTH))
    return tuple(array.astype(dtype) for array in (queries, keys, values))


def mlx_attention(given, mask, sinks=None):
    return mx.fast.scaled_dot_product_attention(*given, scale=SCALE, mask=mask, sinks=sinks)


def selecting(*shape):
    mx.random.seed(6)
    mask = mx.random.uniform(shape=shape) < 0.5
    mask[..., 0] = True
    return mask


MASKS = {
    "none": lambda _: None,
    "causal": lambda _: "causal",
    "matrix": lambda _: selecting(WIDTH, POSITIONS),
    "for all heads": lambda _: selecting(1, WIDTH, POSITIONS),
    "for all rows": lambda _: selecting(1, 1, WIDTH, POSITIONS),
    "by row": lambda rows: selecting(rows, 1, WIDTH, POSITIONS),
    "for all queries": lambda rows: selecting(rows, 1, 1, POSITIONS),
    "by row, turned": lambda rows: selecting(POSITIONS, WIDTH, 1, rows).transpose(3, 2, 1, 0),
}


@pytest.mark.parametrize("way", ["in_pieces", "in_blocks", "in_tiles", "in_kernel"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_that_of_mlx(request, mask, has_sinks, rows, way):
    given, mask = arrays(rows), MASKS[mask](rows)
    sinks = mx.array([-1.0, 0.5, 2.0, 9.0]) if has_sinks else None
    expected = mlx_attention(given, mask, sinks)
    request.getfixturevalue(way)
    output = attend_whole(*given, scale=SCALE, mask=mask, sinks=sinks)
    assert output.shape == expected.shape
    assert mx.allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("mask", ["none", "by row", "for all queries"])
@pytest.mark.parametrize("way", [("in_tiles", 60), ("in_tiles", 2**16), ("in_kernel", 60)])
def test_a_part_of_the_keys_is_that_of_the_engine(request, sized, mask, is_shared, way):
    queries, keys, values = arrays(3)
    if is_shared:
        keys, values = keys[:1], values[:1]
    seen = MASKS[mask](3)
    if seen is not None:
        seen[1] = False  # a row that sees none of these keys
    over = attention.over_shared if is_shared else attention.over_own
    expected = over(queries, keys, values, SCALE, seen)
    fixture, tile_scores = way
    request.getfixturevalue(fixture)
    sized(TILE_SCORES=tile_scores)
    output, top, total = whole_attention.attend_part(queries, keys, values, SCALE, seen)
    assert mx.allclose(output, expected.output, rtol=1e-5, atol=1e-5)
    assert mx.allclose(top, expected.top, rtol=1e-5, atol=1e-5)
    assert mx.allclose(total, expected.total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [("by_numpy", 60), ("by_numpy", 2**16), ("by_kernel", 60)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mask", ["none", "causal", "by row"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 32), (4, 32), (4, 64)])
def test_quantised_keys_are_attended_to_as_by_mlx(
    request, sized, bits, group_size, mask, rows, way
):
    fixture, tile_scores = way
    request.getfixturevalue(fixture)
    queries, packing = arrays(rows)[0], {"bits": bits, "group_size": group_size}
    queries = mx.concatenate([queries] * 4, axis=-1)
    numbers = mx.random.normal((2, rows, KV_HEADS, POSITIONS + 5, queries.shape[-1]))
    stored = [mx.quantize(each, **packing) for each in numbers]
    # Of buffers with room for more positions.
    keys, values = ([array[:, :, :POSITIONS] for array in each] for each in stored)
    seen, device = MASKS[mask](rows), Device()
    sized(TILE_SCORES=tile_scores, LEAST_POSITIONS=7, LEAST_QUANTISED=10**6)
    expected = attention.over_quantised(queries + 0, keys, values, SCALE, seen, packing)
    install(device, mx.Device(mx.cpu))
    assert device.attend_quantised(queries, keys, values, SCALE, seen, bits) is None  # too few
    sized(LEAST_QUANTISED=0)
    output = device.attend_quantised(queries, keys, values, SCALE, seen, bits)
    assert mx.allclose(output, expected, rtol=1e-4, atol=1e-4)
    assert device.attend_quantised(queries, keys, values, SCALE, seen, 2) is None


def test_few_scores_and_16_bits_are_no_part_to_compute_here(sized):
    for least, most, is_known in ((1, 0, False), (0, 1, False), (0, 0, kernels() is not None)):
        scores, of_head = 3 * HEADS * WIDTH * POSITIONS, HEADS // KV_HEADS * WIDTH
        sized(LEAST_OF_KERNEL=scores + least, MOST_QUERIES=of_head - most)
        assert (whole_attention.attend_part(*arrays(3), SCALE, None) is not None) == is_known
    sized(LEAST_TILED=0)
    assert whole_attention.attend_part(*arrays(3), SCALE, None)
    assert whole_attention.attend_part(*arrays(3, dtype=mx.bfloat16), SCALE, None) is None


@pytest.mark.parametrize("rows", [2, 3])
def test_a_prefix_that_rows_share_is_computed_in_tiles(monkeypatch, sized, rows):
    """The batch takes the device's function for tails and prefix, and its scores stay the same."""
    install(device := Device(), mx.Device(mx.cpu))
    seen = []

    def noted(queries, keys, *rest):
        seen.append((len(queries), len(keys)))
        return whole_attention.attend_part(queries, keys, *rest)

    def attended(device):
        monkeypatch.setattr(attention, "DEVICE", device)
        queries, keys, values = arrays(rows, width=1)
        shared = [each[:1] for each in (keys, values)]
        parts = [
            attention.over_some(queries, *pair, SCALE, None) for pair in ((keys, values), shared)
        ]
        return attention.merged(parts, None, mx.float32)

    expected = attended(Device())
    sized(LEAST_TILED=0)
    device.attend_part = noted
    assert mx.allclose(attended(device), expected, rtol=1e-5, atol=1e-6)
    assert seen == [(rows, rows), (rows, 1)]


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_blocks_are_shared_by_as_many_threads_as_products_have(monkeypatch, threads):
    blas = shared_work.openblas
    monkeypatch.setattr(blas, "has_openblas", lambda: True)
    monkeypatch.setattr(blas, "threads", lambda: threads)
    used, block, both = set(), whole_attention.attend_block, threading.Barrier(threads, timeout=30)

    def noted(*given):
        if threading.get_ident() not in used:
            used.add(threading.get_ident())
            both.wait()
        return block(*given)

    expected = attend_whole(*arrays(1), scale=SCALE, mask="causal", sinks=None)
    monkeypatch.setattr(whole_attention, "attend_block", noted)
    monkeypatch.setattr(shared_work, "usable_cores", lambda: threads)
    shared_work.work_threads.cache_clear()
    output = attend_whole(*arrays(1), scale=SCALE, mask="causal", sinks=None)
    shared_work.work_threads.cache_clear()
    assert len(used) == threads
    assert mx.array_equal(output, expected)


@pytest.mark.usefixtures("in_blocks")
def test_blocks_that_no_query_sees_are_not_computed(monkeypatch):
    given = arrays(1)
    given[1][:, :, -9:] = mx.nan  # as keys and values of spare room may be
    mask = mx.broadcast_to(mx.arange(POSITIONS) < POSITIONS - 9 - 5, (WIDTH, POSITIONS))
    monkeypatch.setattr(whole_attention, "COLUMNS", POSITIONS - 9)
    assert mx.isfinite(attend_whole(*given, scale=SCALE, mask=mask, sinks=None)).all()


@pytest.mark.usefixtures("in_blocks")
def test_keys_may_be_part_of_a_larger_array():
    queries, keys, values = arrays(1)
    larger = [mx.concatenate([each, each], axis=2)[:, :, :POSITIONS] for each in (keys, values)]
    whole, part = (
        attend_whole(queries, *each, scale=SCALE, mask="causal", sinks=None)
        for each in ((keys, values), larger)
    )
    assert mx.array_equal(whole, part)


@pytest.fixture
def however_few(sized):
    sized(LEAST_SCORES=0, LEAST_QUERIES=1)


@pytest.mark.usefixtures("however_few")
def test_a_function_that_is_compiled_gets_pieces(monkeypatch):
    monkeypatch.setattr(whole_attention, "in_blocks", None)
    attend = mx.compile(lambda *given: attend_whole(*given, scale=SCALE, mask=None, sinks=None))
    assert mx.allclose(attend(*arrays(1)), mlx_attention(arrays(1), None), atol=1e-6)


@pytest.mark.usefixtures("however_few")
@pytest.mark.parametrize("mask", ["causal", None])
def test_blocks_have_the_gradient_of_attention(mask):
    given = list(arrays(2))
    weights = mx.random.normal((2, HEADS, WIDTH, VALUE_WIDTH))

    def ours(given):
        return (attend_whole(*given, scale=SCALE, mask=mask, sinks=None) * weights).sum()

    def theirs(given):
        return (mlx_attention(given, mask) * weights).sum()

    for one, other in zip(mx.grad(ours)(given), mx.grad(theirs)(given), strict=True):
        assert mx.abs(other).max() > 0.1
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_no_query_of_a_causal_piece_computes_scores_of_later_positions(monkeypatch):
    seen, over_own = [], whole_attention.over_own

    def noted(queries, keys, *rest):
        seen.append((queries.shape[2], keys.shape[2]))
        return over_own(queries, keys, *rest)

    monkeypatch.setattr(whole_attention, "over_own", noted)
    attend_whole(*arrays(1), scale=SCALE, mask="causal", sinks=None)
    assert seen == [(3, 42), (3, 45), (3, 48), (2, 50)]


@pytest.mark.parametrize(
    "mask", [selecting(1, HEADS, WIDTH, POSITIONS), mx.zeros((WIDTH, POSITIONS))]
)
def test_masks_of_heads_and_masks_that_are_added_are_left_to_mlx(mask):
    given = arrays(1)
    assert mx.array_equal(
        attend_whole(*given, scale=SCALE, mask=mask, sinks=None), mlx_attention(given, mask)
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bits_are_left_to_mlx(dtype):
    given = arrays(1, dtype=dtype)
    assert mx.array_equal(
        attend_whole(*given, scale=SCALE, mask=None, sinks=None), mlx_attention(given, None)
    )


def test_few_scores_are_left_to_mlx(monkeypatch):
    monkeypatch.setattr(exponentials, "LEAST_NUMBERS", HEADS * WIDTH * POSITIONS + 1)
    given = arrays(1)
    assert mx.array_equal(
        attend_whole(*given, scale=SCALE, mask=None, sinks=None), mlx_attention(given, None)
    )


def test_scores_that_are_no_numbers_show_in_the_output():
    given = arrays(1)
    given[0][0, 0, 4, 0] = mx.nan
    bad = mx.isnan(attend_whole(*given, scale=SCALE, mask="causal", sinks=None)).any(axis=-1)
    assert bad[0, 0, 4].item()
    assert int(bad.sum()) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_a_network_with_its_own_caches_has_its_attention_in_pieces(networks, family, monkeypatch):
    """Upstream's attention is routed here, and the scores of the next token stay the same."""
    from mlx_lm.models.cache import make_prompt_cache

    install(device := Device(), mx.Device(mx.cpu))
    assert 0 < device.attend_from < math.inf
    device.attend_from = 0
    monkeypatch.setattr(attention, "DEVICE", device)
    attention.install()
    network, tokens = networks(family), mx.arange(3, 20)[None]
    pieces, over_own = [], whole_attention.over_own

    def counted(*given):
        pieces.append(1)
        return over_own(*given)

    monkeypatch.setattr(whole_attention, "over_own", counted)
    logits = network(tokens, cache=make_prompt_cache(network))
    mx.eval(logits)
    assert pieces
    monkeypatch.setattr(attention, "DEVICE", Device())
    expected = network(tokens, cache=make_prompt_cache(network))
    assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4)
