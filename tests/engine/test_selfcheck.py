import importlib

import mlx.core as mx
import pytest
from engine_driver import VOCAB

from backend.engine.caches import CacheFactory
from backend.engine.selfcheck import batching_fault
from backend.model.upstream import import_mlx_lm

pytestmark = pytest.mark.mlx


def fault(network):
    return batching_fault(network, CacheFactory(network), VOCAB)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2"]
)
def test_families_that_batch_correctly_pass(networks, family):
    assert fault(networks(family)) is None


def test_caches_without_merge_are_told():
    import_mlx_lm()

    class Unmergeable:
        state = ()

    class Network:
        layers = ()

        def make_cache(self):
            return [Unmergeable()]

        def __call__(self, inputs, cache):  # noqa: ARG002
            return mx.zeros((*inputs.shape, VOCAB))

    assert "Unmergeable cannot be merged" in fault(Network())


def test_llama4_cannot_be_batched(networks):
    assert "ChunkedKVCache" in fault(networks("llama4"))


class SwappingNetwork:
    """Answers each row of a batch with another row's logits."""

    def __init__(self, network):
        self._network = network
        self.layers = network.layers

    def __call__(self, inputs, cache):
        return self._network(inputs, cache=cache)[::-1]


def test_a_model_that_mixes_rows_up_is_told(networks):
    assert "differ" in fault(SwappingNetwork(networks("llama")))


class RaisingNetwork(SwappingNetwork):
    def __call__(self, inputs, cache):
        if inputs.shape[0] > 1:
            raise ValueError("no batches, please")
        return self._network(inputs, cache=cache)


def test_a_model_that_raises_in_a_batch_is_told(networks):
    assert "no batches, please" in fault(RaisingNetwork(networks("llama")))


def test_gemma2_of_this_mlx_lm_breaks_in_a_batch():
    """Upstream contract: when this fails, gemma2 has been mended and may be batched."""
    import_mlx_lm()
    module = importlib.import_module("mlx_lm.models.gemma2")
    mx.random.seed(0)
    network = module.Model(
        module.ModelArgs(
            model_type="gemma2",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            head_dim=16,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            num_key_value_heads=2,
        )
    )
    assert fault(network) is not None
