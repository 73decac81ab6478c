"""Facts on which the engine relies in the installed mlx-lm; a new version has to pass this."""

import inspect

import mlx.core as mx
import pytest

from backend.cache.kv import ALLOCATION_STEP_TOKENS
from backend.model.checkpoint.upstream import import_mlx_lm

pytestmark = pytest.mark.mlx

import_mlx_lm()
cache = pytest.importorskip("mlx_lm.models.cache")

BATCHED = ["KVCache", "RotatingKVCache", "ArraysCache", "CacheList"]


@pytest.mark.parametrize("name", BATCHED)
def test_caches_that_batch_can_merge(name):
    assert list(inspect.signature(getattr(cache, name).merge).parameters) == ["caches"]


@pytest.mark.parametrize(
    "name", ["BatchKVCache", "BatchRotatingKVCache", "ArraysCache", "CacheList"]
)
def test_batch_caches_let_rows_join_and_leave(name):
    kind = getattr(cache, name)
    for method, parameters in {"filter": 1, "extend": 1, "extract": 1}.items():
        given = [p for p in inspect.signature(getattr(kind, method)).parameters if p != "self"]
        assert len(given) == parameters


@pytest.mark.parametrize("name", ["ChunkedKVCache", "QuantizedKVCache"])
def test_caches_that_do_not_batch_have_no_merge(name):
    assert not hasattr(getattr(cache, name), "merge")


@pytest.mark.parametrize("library", ["mlx_lm", "mlx_vlm"])
def test_attention_takes_these_parameters(library):
    base = pytest.importorskip(f"{library}.models.base")
    attend = inspect.unwrap(base.scaled_dot_product_attention)
    expected = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    assert list(inspect.signature(attend).parameters) == expected


def test_merging_copies_and_leaves_the_single_caches_as_they_were():
    single = cache.KVCache()
    single.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    merged = type(single).merge([single, single])
    merged.update_and_fetch(mx.zeros((2, 1, 1, 2)), mx.zeros((2, 1, 1, 2)))
    assert single.offset == 3
    assert (single.keys[..., :3, :] == 1).all().item()


def test_an_extracted_row_is_contiguous_and_of_its_own_length():
    short, long = cache.KVCache(), cache.KVCache()
    for single, length in ((short, 2), (long, 5)):
        single.update_and_fetch(mx.ones((1, 1, length, 2)), mx.ones((1, 1, length, 2)))
    merged = cache.KVCache.merge([short, long])
    assert [merged.extract(i).offset for i in range(2)] == [2, 5]


@pytest.mark.parametrize("name", ["KVCache", "QuantizedKVCache", "RotatingKVCache"])
def test_caches_of_positions_grow_in_steps_of_256_tokens(name):
    assert getattr(cache, name).step == ALLOCATION_STEP_TOKENS
