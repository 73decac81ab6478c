"""What the drafters compute that have no tokens of their own, compared with upstream's."""

import json

import mlx.core as mx
import pytest
from mlx_vlm.speculative.drafters import load_drafter

from backend.cache.kv import Part, RowKV
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.caches import CacheFactory
from backend.engine.plan import Batching, BatchPlan
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.heads import build_head, head_alone
from scripts.tiny_drafters import GEMMA4, add_assistant
from scripts.tiny_models import build

pytestmark = pytest.mark.mlx

LENGTHS = (5, 31, 70)


# How the keys of every position are kept.
WAYS = {
    "ragged": CacheFactory,
    "padded": lambda network: CacheFactory(network, plan=BatchPlan(Batching.PADDED)),
    "in place": lambda network: CacheFactory(network, plan=BatchPlan(shares_prefixes=True)),
    "quantised": lambda network: CacheFactory(network, 8, (None, 32) * 2),
}


def shared(caches):
    """Let a row use the first positions of its caches in place, as if they were stored."""
    for cache in caches:
        if isinstance(cache, RowKV):
            cache.refer([Part(cache.slices(0, 2), 2), Part(cache.slices(2, 4), 2)])
    return caches


def loaded(directory):
    return import_mlx_lm().load_model(directory)[0]


def built(head, network):
    return build_head(head_alone(head), head, network, None)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gemma")
    build("llama", directory / "model", **GEMMA4, num_key_value_heads=4)
    add_assistant(directory / "model", directory / "head")
    return directory


def prompt(length):
    return [(7 * n * n + length) % 512 for n in range(length)]


def expected_logits(theirs, kept, network, tokens, state, latest):
    """Return the logits of upstream's module, given all keys of a row that was fed at once."""
    caches = CacheFactory(network)()
    network(mx.array([tokens]), cache=caches)
    shared = {
        kind: (
            caches[layer].keys[..., : len(tokens), :],
            caches[layer].values[..., : len(tokens), :],
        )
        for kind, layer in kept.items()
    }
    shared["sliding_attention"] = tuple(a[..., -24:, :] for a in shared["sliding_attention"])
    embedded = network.model.embed_tokens(mx.array([[latest]])) * network.model.embed_scale
    inputs = mx.concatenate([embedded, state[None]], axis=-1)
    theirs.set_shared_kv(shared, len(tokens))
    # The window has been cut above: upstream's mask hides one position more.
    theirs.config.text_config.sliding_window = 4096
    return theirs(inputs, shared, mx.array([[len(tokens) - 1]]))[1][0, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS[2:], LENGTHS])
def test_an_assistant_sees_the_latest_keys_of_every_row(gemma, lengths, way):
    network = loaded(gemma / "model")
    assistant = built(gemma / "head", network)
    theirs, _ = load_drafter(str(gemma / "head"), "mtp")
    fresh_caches, tolerance = WAYS[way](network), 0.3 if way == "quantised" else 2e-4
    batch, rows = BatchCaches(fresh_caches.plan), []
    for length in lengths:
        caches = fresh_caches()
        network(mx.array([prompt(length)]), cache=caches)
        rows.append(shared(caches) if way == "in place" else caches)
    batch.regroup([], rows)
    texts = [prompt(length) for length in lengths]
    states = mx.random.normal((len(lengths), 1, 64), key=mx.random.key(1))
    # Plain steps, then passes of which rows keep unlike parts.
    for step in range(30):
        counts = [1] * len(texts) if step % 3 else [3 - n % 2 for n in range(len(texts))]
        fed = [[(step + 11 * n + k) % 512 for k in range(count)] for n, count in enumerate(counts)]
        batch.take(network, fed)
        kept = [max(count - (n + step) % 2, 1) for n, count in enumerate(counts)]
        batch.keep(kept)
        texts = [[*text, *new[:k]] for text, new, k in zip(texts, fed, kept, strict=True)]
        if step % 4:
            continue
        layers = batch.latest(list(assistant.shared.values()))
        seen = {kind: (layer, layer) for kind, layer in zip(assistant.shared, layers, strict=True)}
        places = mx.array([len(text) - 1 for text in texts])
        _, logits = assistant(mx.array([9] * len(texts)), states, seen, places)
        for n, text in enumerate(texts):
            alone = expected_logits(theirs, assistant.shared, network, text, states[n], 9)
            assert mx.allclose(logits[n], alone, atol=tolerance), (step, n)


REFUSALS = {
    "width": ({"backbone_hidden_size": 96}, "states of 96 numbers .backbone_hidden_size., and"),
    "vocabulary": ({"vocab_size": 600}, "of 600 tokens .text_config.vocab_size., and the model"),
    "keys": ({"global_head_dim": 64}, "keys of 64 numbers .text_config.global_head_dim., and"),
    "heads": ({"num_attention_heads": 6}, "6 attention heads .text_config.num_attention_heads."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_assistant_of_another_model_is_refused_by_its_field(gemma, tmp_path, case):
    fields, words = REFUSALS[case]
    text = json.loads((gemma / "head" / "config.json").read_text("utf-8"))["text_config"]
    own = fields if case == "width" else {"text_config": text | fields}
    add_assistant(gemma / "model", tmp_path, **own)
    with pytest.raises(UnsupportedModelError, match=words):
        built(tmp_path, loaded(gemma / "model"))
