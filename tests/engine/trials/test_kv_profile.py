"""The expected bytes of a model's caches, against the actual ones."""

import pytest
from engine_driver import Driver, make_request, prompt_of
from whole_trial import measure

from backend.cache.kv import ALLOCATION_STEP_TOKENS
from backend.config import TuningOptions
from backend.engine.passes.caches import make_cache_factory
from backend.engine.rows.admission import KvProfile

pytestmark = pytest.mark.mlx

FAMILIES = [
    *("llama", "llama_sliding", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32"),
    *("qwen3_next", "qwen3_5", "mamba2", "nemotron_h", "granitemoehybrid", "kimi_linear"),
]


def profile_of(network, **tuning) -> KvProfile:
    return measure(network, make_cache_factory(network, TuningOptions.of(**tuning)))


def taken(network, lengths, **tuning) -> int:
    """Return the bytes of the KV caches of rows that decode together."""
    driver = Driver(network, max_cache_bytes=0, prefill_chunk_alone=48, **tuning)
    for number, length in enumerate(lengths):
        driver.loop.requests.submit(make_request(str(number), prompt_of(length), max_tokens=40))
    while driver.loop.status().metrics["generated_tokens"] < 20 * len(lengths):
        driver.turn()
    return driver.loop.status().memory_bytes["kv_active"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[300], [40, 300, 9]], ids=["alone", "together"])
@pytest.mark.one_in(3)
def test_caches_take_what_is_expected_or_a_little_less(networks, family, lengths):
    profile = profile_of(networks(family))
    longest = max(lengths) + 40
    most = len(lengths) * profile.row_bytes(longest)
    least = len(lengths) * profile.row_bytes(longest - 2 * ALLOCATION_STEP_TOKENS)
    assert least <= taken(networks(family), lengths) <= most


def test_chunks_of_attention_are_bounded(networks):
    profile = profile_of(networks("llama4"))
    assert taken(networks("llama4"), [300], batches=False) <= profile.row_bytes(340)
    (chunked,) = profile.windows
    assert chunked.size < 2 * ALLOCATION_STEP_TOKENS


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_caches_are_measured_as_they_are(networks, bits):
    options = {"kv_bits": bits, "kv_group_size": 32}
    profile = profile_of(networks("llama_wide"), **options)
    assert profile.bytes_per_token < profile_of(networks("llama_wide")).bytes_per_token
    assert taken(networks("llama_wide"), [300], batches=False, **options) <= profile.row_bytes(340)


def test_a_recurrent_state_has_one_size(networks):
    profile = profile_of(networks("mamba2"))
    assert (profile.bytes_per_token, profile.windows) == (0, ())
    assert profile.row_bytes(10) == profile.row_bytes(10**6) == profile.fixed_bytes > 0


def test_windows_are_told_from_layers_that_keep_everything(networks):
    profile = profile_of(networks("gemma3_text"))
    assert profile.bytes_per_token > 0
    (window,) = profile.windows
    assert window.size < ALLOCATION_STEP_TOKENS
