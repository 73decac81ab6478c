"""Bugs of the libraries' model code, and networks without them."""

import mlx.core as mx
import pytest
from mlx_vlm.utils import load_model

from backend.model.checkpoint.weights import mend
from scripts.sweep.vision_models import build_vision_model

pytestmark = pytest.mark.mlx

WIDTH = 64


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory):
    """Return gemma3n as mlx-vlm builds it, and mended."""
    directory = build_vision_model("gemma3n", tmp_path_factory.mktemp("gemma3n"))
    plain, mended = load_model(directory), load_model(directory)
    mend(mended)
    return plain, mended


def logits_of(network, **given):
    return network.language_model(cache=network.make_cache(), **given).logits


def test_gemma3n_reads_an_embedded_prompt_as_it_reads_tokens(gemma3n):
    """Upstream contract: its decoder scales the embeddings of tokens, and its prompts are not."""
    plain, mended = gemma3n
    ids = mx.array([[5, 9, 7, 300]])
    read = logits_of(plain, inputs=ids)
    embedded = [
        logits_of(network, **network.get_input_embeddings(ids).to_dict()) for network in gemma3n
    ]
    assert mx.allclose(embedded[1], read, atol=1e-4)
    assert not mx.allclose(embedded[0], read, atol=1e-2)
    assert mx.array_equal(logits_of(mended, inputs=ids), read)


def test_gemma3n_scales_text_and_no_picture(gemma3n):
    plain, mended = gemma3n
    image = plain.config.image_token_id
    ids = mx.array([[5, image, 7]])
    given = {"pixel_values": mx.zeros(1), "cached_image_features": mx.full((1, 1, WIDTH), 0.5)}
    before, after = (
        network.get_input_embeddings(ids, **given).inputs_embeds[0] for network in (plain, mended)
    )
    assert mx.array_equal(after[1], mx.full(WIDTH, 0.5))
    assert mx.allclose(after[0], before[0] * WIDTH**0.5)
    assert mx.allclose(after[2], before[2] * WIDTH**0.5)
