"""Projections of glm5_next from its latents are kept by row, and never stored."""

import mlx.core as mx
import pytest
from engine_driver import Driver, make_request, prompt_of
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.models.cache import KVCache
from mlx_vlm.utils import load_model

from backend.cache.kv import Piece, Segment, evaluate
from backend.cache.layers import cache_leaves, class_of
from backend.cache.layout import CacheLayout
from backend.model.checkpoint.mends import mend
from backend.model.vision.vision_network import VisionNetwork
from scripts.sweep.vision_models import build_vision_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    model = load_model(build_vision_model("glm5_next", tmp_path_factory.mktemp("model")))
    mend(model)
    return VisionNetwork(model)


def fed(network, caches, tokens, *widths):
    """Feed tokens in passes of these widths; return the logits [V] after the last."""
    start = 0
    for width in widths:
        logits = network(mx.array([tokens[start : start + width]]), cache=caches)
        start += width
    mx.eval(logits, [cache.state for cache in caches])
    return logits[0, -1]


def test_a_prefix_that_ends_in_single_tokens_is_stored_and_goes_on(network):
    """Upstream contract: its own projections end where the passes of several tokens ended."""
    tokens, caches = prompt_of(60), make_prompt_cache(network)
    layout = CacheLayout.of(caches)
    fed(network, caches, tokens, 20, 1, 1, 1, 1, 1)
    segment = Segment(layout.capture(caches, 0, 25), layout.snapshot(caches))
    evaluate([segment])
    again = make_prompt_cache(network)
    layout.restore(again, [Piece(segment, 25)], 25, 60)
    found = fed(network, again, tokens[25:], 1, 20)
    expected = fed(network, make_prompt_cache(network), tokens[:46], 46)
    assert mx.allclose(found, expected, atol=1e-4)


def test_projections_of_tokens_that_were_given_back_are_not_used(network):
    tokens, caches = prompt_of(60), make_prompt_cache(network)
    fed(network, caches, tokens, 20)
    states = [(leaf, class_of(leaf).remember) for leaf in cache_leaves(caches)]
    ways_back = [remember(leaf) for leaf, remember in states if remember]
    fed(network, caches, prompt_of(12, 5), 12)
    for go_back in ways_back:
        go_back([0])
    for leaf in cache_leaves(caches):
        if give_back := class_of(leaf).give_back:
            give_back(leaf, [12])
    found = fed(network, caches, tokens[20:], *[1] * 12, 16)
    expected = fed(network, make_prompt_cache(network), tokens[:48], 48)
    assert mx.allclose(found, expected, atol=1e-4)


def test_flags_of_rejected_tokens_do_not_come_round_before_the_first():
    caches = [KVCache(), KVCache()]
    for cache, count in zip(caches, (5, 8), strict=True):
        flags = mx.ones((1, 1, count, 1), mx.bool_)
        cache.update_and_fetch(flags, mx.zeros((1, 1, count, 0), mx.bool_))
    # A merged cache has no spare places.
    batch = caches[0].merge(caches)
    class_of(batch).give_back(batch, [0, 3])
    assert mx.argmax(batch.keys[:, 0, :, 0].astype(mx.int32), axis=1).tolist() == [3, 3]


def test_rows_of_a_few_tokens_leave_a_batch(network):
    """Upstream contract: nothing has been projected for them, which its own caches cannot cut."""
    requests = [make_request(f"r{n}", prompt_of(3 + n), max_tokens=4 + 3 * n) for n in range(3)]
    expected = [Driver(network).run(request)[0].token_ids for request in requests]
    assert [reply.token_ids for reply in Driver(network).run(*requests)] == expected


def test_a_reply_is_stored_and_continued(network, caplog):
    driver = Driver(network, max_kv_bytes=2**30)
    prompt = prompt_of(40)
    (first,) = driver.run(make_request("a", prompt, max_tokens=12))
    longer = [*prompt, *first.token_ids, *prompt_of(9, 3)]
    (again,) = driver.run(make_request("b", longer, max_tokens=12))
    assert again.cached_tokens >= len(prompt) + 11
    (alone,) = Driver(network).run(make_request("b", longer, max_tokens=12))
    assert again.token_ids == alone.token_ids
    assert "cannot be stored" not in caplog.text
