"""The contents of sliding windows between the chunks of a prompt."""

import mlx.core as mx
import pytest
from engine_driver import prompt_of
from mlx_lm.models.cache import make_prompt_cache

from backend.cache.layout import trim_windows

pytestmark = pytest.mark.mlx

FAMILIES = ["gemma3_text", "gpt_oss", "llama_sliding"]


def fed(network, caches, tokens):
    logits = network(mx.array([tokens]), cache=caches)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [(5, 60), (100, 1), (7, 3)], ids=str)
def test_trimming_changes_no_logit_and_leaves_no_more_than_the_window(networks, family, chunks):
    network = networks(family)
    plain, trimmed = make_prompt_cache(network), make_prompt_cache(network)
    for number, length in enumerate((*chunks, 1, 1)):
        tokens = prompt_of(length, number)
        expected = fed(network, plain, tokens)
        assert mx.allclose(fed(network, trimmed, tokens), expected, atol=1e-5).item()
        trim_windows(trimmed)
        rings = [cache for cache in trimmed if hasattr(cache, "max_size")]
        assert all(ring.keys.shape[-2] <= max(ring.max_size, ring.step) for ring in rings)
        assert all(one.offset == other.offset for one, other in zip(plain, trimmed, strict=True))


def test_caches_without_windows_stay_as_they_are(networks):
    caches = make_prompt_cache(networks("llama"))
    trim_windows(caches)
    fed(networks("llama"), caches, prompt_of(300))
    before = [cache.keys for cache in caches]
    trim_windows(caches)
    assert all(cache.keys is keys for cache, keys in zip(caches, before, strict=True))
