import importlib
import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from engine_driver import prompt_of
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_vlm.utils import load_model

from backend.cache.kv import Packing, Piece, Segment, evaluate
from backend.cache.layers import CACHE_CLASSES, cache_leaves
from backend.cache.layout import CacheLayout, CaptureError
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.vision.vision_network import RopePositions, VisionNetwork
from scripts.sweep.families import all_families

pytestmark = pytest.mark.mlx

CHUNK = 32
# Ids that the smallest vocabulary has.
PROMPT = [token_id % 94 for token_id in prompt_of(160)]
CUTTABLE = ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3"]
WIDE = ["llama_wide", "gemma3_wide"]
STATEFUL = ["qwen3_next", "qwen3_5", "mamba2", "llama4"]
# Of classes that only a family has.
OF_FAMILIES = {
    "deepseek_v41": "mlx-lm",
    "glm5_next": "mlx-vlm",
    "llama4": "mlx-vlm",
    "qwen4_exp": "mlx-vlm",
    "z1t": "mlx-vlm",
}
# Made from a network's own caches by the option `kv_bits`, never by a network.
MADE_BY_OPTION = {"QuantizedKVCache"}
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def own_networks(tmp_path_factory):
    """Return a function that returns a network of a family with cache classes of its own."""

    @cache
    def build(name):
        family = next(f for f in all_families() if (f.name, f.library) == (name, OF_FAMILIES[name]))
        directory = family.build(tmp_path_factory.mktemp(name))
        if family.library == "mlx-lm":
            return import_mlx_lm().load_model(directory)[0]
        return VisionNetwork(load_model(directory))

    return build


def feed(network, caches, tokens):
    logits = network(mx.array([tokens]), cache=caches)[:, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def prefilled(network, stop):
    caches = make_prompt_cache(network)
    for start in range(0, stop, CHUNK):
        feed(network, caches, PROMPT[start : min(start + CHUNK, stop)])
    return caches


def stored(network, layout, stop, snapshots_at=()):
    """The segments of a prefill in chunks, as they would be captured on the way."""
    caches = make_prompt_cache(network)
    segments = []
    stops = sorted({*range(CHUNK, stop, CHUNK), stop, *snapshots_at})
    for start, end in zip([0, *stops], stops, strict=False):
        feed(network, caches, PROMPT[start:end])
        segments.append(Segment(layout.capture(caches, start, end), layout.snapshot(caches)))
    evaluate(segments)
    return segments


def path_to(segments, length):
    path = []
    for segment in segments:
        if length <= 0:
            break
        path.append(Piece(segment, min(segment.tokens, length)))
        length -= segment.tokens
    return path


def restored(network, layout, segments, length, capacity=200):
    caches = make_prompt_cache(network)
    layout.restore(caches, path_to(segments, length), length, capacity)
    mx.eval([cache.state for cache in caches])
    return caches


def arrays_of(*all_caches):
    """Return the arrays of caches of the same kinds, side by side."""
    columns = [[leaf.keys_and_values() for leaf in cache_leaves(c)] for c in all_caches]
    return [pair for leaves in zip(*columns, strict=True) for pair in zip(*leaves, strict=True)]


def continuation(network, caches, position):
    """Logits of the rest of the prompt, in one piece, and of three more tokens."""
    logits = [feed(network, caches, PROMPT[position:])]
    logits += [feed(network, caches, [token]) for token in (5, 6, 7)]
    return mx.stack(logits)


@pytest.mark.parametrize("family", CUTTABLE)
@pytest.mark.parametrize("cut", [1, 10, 31, 32, 33, 64, 90, 127, 159])
@pytest.mark.one_in(5)
def test_a_prefix_restored_at_any_cut_goes_on_like_one_that_was_computed(networks, family, cut):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    segments = stored(network, layout, 160)
    assert layout.usable(path_to(segments, 160), cut) == cut
    warm = continuation(network, restored(network, layout, segments, cut), cut)
    cold = continuation(network, prefilled(network, cut), cut)
    assert mx.allclose(warm, cold, atol=2e-5).item()


@pytest.mark.parametrize("family", STATEFUL)
def test_a_model_with_state_is_restored_at_a_snapshot_only(networks, family):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    segments = stored(network, layout, 150, snapshots_at=[50, 77])
    path = path_to(segments, 150)
    assert [layout.usable(path, limit) for limit in (31, 32, 49, 76, 77, 149, 150)] == [
        *(0, 32, 32, 64, 77, 128, 150)
    ]
    for cut in (32, 50, 77, 150):
        warm = continuation(network, restored(network, layout, segments, cut), cut)
        cold = continuation(network, prefilled(network, cut), cut)
        assert mx.allclose(warm, cold, atol=2e-5).item()


@pytest.mark.parametrize("family", [*CUTTABLE, *STATEFUL])
@pytest.mark.one_in(2)
def test_what_is_restored_shares_nothing_with_the_store(networks, family):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    segments = stored(network, layout, 100)
    first = restored(network, layout, segments, 100, capacity=100)
    second = restored(network, layout, segments, 100, capacity=100)
    for token in range(20):
        feed(network, first, [token])
        feed(network, second, [token + 40])
    warm = continuation(network, restored(network, layout, segments, 100), 100)
    assert mx.allclose(warm, continuation(network, prefilled(network, 100), 100), atol=2e-5).item()


@pytest.mark.parametrize("family", [*CUTTABLE, *STATEFUL])
@pytest.mark.one_in(2)
def test_segments_split_at_any_token_restore_the_same(networks, family):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    whole = stored(network, layout, 96)
    cold = continuation(network, prefilled(network, 96), 96)
    for at in (1, 13, 31):
        halves = [half for segment in whole for half in segment.split(at)]
        evaluate(halves)
        assert sum(half.tokens for half in halves) == 96
        assert layout.usable(path_to(halves, 96), 96) == 96
        warm = continuation(network, restored(network, layout, halves, 96), 96)
        assert mx.allclose(warm, cold, atol=2e-5).item()


@pytest.mark.parametrize("family", CUTTABLE)
def test_a_store_holds_the_bytes_of_its_tokens_and_no_more(networks, family):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    short, long = stored(network, layout, 32), stored(network, layout, 160)
    assert sum(s.size.nbytes for s in long) == 5 * sum(s.size.nbytes for s in short)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_window_that_was_overwritten_is_not_restored(networks, family):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    caches = prefilled(network, 32)
    for token in PROMPT[32:160]:
        feed(network, caches, [token])
    segment = Segment(layout.capture(caches, 0, 160))
    known = [block.has_windows for block in segment.blocks]
    assert known == [False, True]
    lost = segment.blocks[0].tokens
    path = [Piece(segment, 160)]
    assert layout.usable(path, 160) == 160
    assert layout.usable(path, lost + 3) == 0
    evaluate([segment])
    for cut in (160, 159):
        assert layout.usable(path, cut) == cut
        warm = restored(network, layout, [segment], cut)
        cold = prefilled(network, cut)
        tail = [feed(network, caches, [9]) for caches in (warm, cold)]
        assert mx.allclose(*tail, atol=2e-5).item()


class Quantised:
    """A network whose caches of all positions are quantised."""

    def __init__(self, network, bits):
        self.network, self.bits = network, bits

    def make_cache(self):
        return [
            cache.to_quantized(group_size=32, bits=self.bits) if type(cache) is KVCache else cache
            for cache in make_prompt_cache(self.network)
        ]

    def __call__(self, inputs, cache):
        return self.network(inputs, cache=cache)


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cut", [1, 10, 31, 32, 33, 90, 159])
@pytest.mark.one_in(5)
def test_a_quantised_cache_restored_at_any_cut_holds_what_was_computed(networks, family, bits, cut):
    network = Quantised(networks(family), bits)
    layout = CacheLayout.of(make_prompt_cache(network))
    halves = [half for segment in stored(network, layout, 160) for half in segment.split(13)]
    warm = restored(network, layout, halves, cut)
    computed = prefilled(network, 160)
    assert type(warm[-1]) is QuantizedKVCache
    for near, far in zip(warm[-1].keys_and_values(), computed[-1].keys_and_values(), strict=True):
        assert all(
            mx.array_equal(one, other[..., :cut, :]) for one, other in zip(near, far, strict=True)
        )
    cold = continuation(network, prefilled(network, cut), cut)
    assert mx.allclose(continuation(network, warm, cut), cold, atol=2e-5).item()


@pytest.mark.parametrize("family", [*WIDE, "deepseek_v32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cut", [1, 10, 31, 32, 33, 90, 159])
@pytest.mark.one_in(5)
def test_packed_segments_restore_the_same_wherever_they_are_cut(networks, family, bits, cut):
    network = networks(family)
    layout = CacheLayout.of(make_prompt_cache(network), Packing(bits))
    segments = stored(network, layout, 160)
    whole = restored(network, layout, segments, cut)
    halves = [half for segment in segments for half in segment.split(13)]
    evaluate(halves)
    assert layout.usable(path_to(halves, 160), cut) == cut
    split = restored(network, layout, halves, cut)
    assert all(mx.array_equal(*pair).item() for pair in arrays_of(whole, split))


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize(("bits", "bytes_share"), [(4, 0.19), (8, 0.32)])
def test_packed_segments_are_small_and_near_to_what_was_computed(
    networks, family, bits, bytes_share
):
    network = networks(family)
    plain = CacheLayout.of(make_prompt_cache(network))
    packed = CacheLayout.of(make_prompt_cache(network), Packing(bits))
    segments = stored(network, packed, 160)
    full_bytes = sum(segment.size.nbytes for segment in stored(network, plain, 160))
    assert sum(segment.size.nbytes for segment in segments) < bytes_share * full_bytes
    warm, cold = restored(network, packed, segments, 160), prefilled(network, 160)
    for near, exact in arrays_of(warm, cold):
        assert near.dtype == exact.dtype
        step = (mx.max(exact) - mx.min(exact)) / (2**bits - 1)
        near, exact = near[..., -20:, :], exact[..., -20:, :]
        assert mx.max(mx.abs(near - exact)).item() <= step.item()


def test_a_layer_that_does_not_use_its_cache_is_left_alone(networks):
    network = networks("llama")
    caches = [*prefilled(network, 40), KVCache()]
    layout = CacheLayout.of([*make_prompt_cache(network), KVCache()])
    segment = Segment(layout.capture(caches, 0, 40))
    evaluate([segment])
    fresh = [*make_prompt_cache(network), KVCache()]
    layout.restore(fresh, [Piece(segment, 40)], 40, 64)
    assert [cache.empty() for cache in fresh] == [cache.empty() for cache in caches]


def test_an_unknown_class_is_never_stored_and_says_so(caplog):
    class OwnCache(KVCache):
        pass

    for unknown in (OwnCache(), ConcatenateKVCache(), RotatingKVCache(8, keep=4)):
        assert CacheLayout.of([KVCache(), unknown]) is None
        assert type(unknown).__name__ in caplog.text


def test_a_cache_that_ends_elsewhere_is_not_captured(networks):
    network = networks("llama")
    layout = CacheLayout.of(make_prompt_cache(network))
    with pytest.raises(CaptureError, match="KVCache ends at 20, not at 21"):
        layout.capture(prefilled(network, 20), 0, 21)


@pytest.mark.parametrize("family", OF_FAMILIES)
@pytest.mark.one_in(2)
def test_a_family_with_classes_of_its_own_is_restored_as_it_was(own_networks, family):
    network = own_networks(family)
    layout = CacheLayout.of(make_prompt_cache(network))
    segments = stored(network, layout, 150, snapshots_at=[50, 77])
    for cut in (32, 50, 77, 150):
        assert layout.usable(path_to(segments, 150), cut) == cut
        warm = continuation(network, restored(network, layout, segments, cut), cut)
        cold = continuation(network, prefilled(network, cut), cut)
        assert mx.allclose(warm, cold, atol=1e-3).item()


def test_every_class_with_a_row_is_used_by_a_family_of_the_layout_tests(networks, own_networks):
    used = {
        type(leaf).__name__
        for networks_of, families in (
            (networks, (*CUTTABLE, *STATEFUL)),
            (own_networks, OF_FAMILIES),
        )
        for family in families
        for leaf in cache_leaves(make_prompt_cache(networks_of(family)))
        if not isinstance(leaf, RopePositions)
    }
    of_a_row = {name.rpartition(".")[2] for name in CACHE_CLASSES}
    assert used | MADE_BY_OPTION == {name for name in of_a_row if not name.startswith("Batch")}


@pytest.mark.parametrize("name", CACHE_CLASSES)
def test_every_class_with_a_row_exists_upstream(name):
    module, _, own = name.rpartition(".")
    named = [module] if module else ["mlx_lm.models.cache", "mlx_vlm.models.cache"]
    assert any(hasattr(importlib.import_module(each), own) for each in named)


def test_the_guide_names_files_that_exist():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = guide.partition("## Adding a class of KV cache")[2].partition("\n## ")[0]
    files = re.findall(r"^- `([^`]+)`:", section, re.MULTILINE)
    assert len(files) == 4
    assert all((ROOT / name).is_file() for name in files)
