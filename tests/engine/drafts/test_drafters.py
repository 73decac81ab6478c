"""Logits of the drafters that have no tokens of their own, compared with upstream's."""

import json

import mlx.core as mx
import pytest
from mlx_vlm.speculative.drafters import load_drafter

from backend.cache.kv import Part, RowKV
from backend.engine.kv.batch_caches import BatchCaches
from backend.engine.passes.caches import CacheFactory
from backend.engine.passes.state_batch import Readings, together
from backend.engine.plan import Batching, BatchPlan
from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import import_mlx_lm
from backend.model.heads import build_head, head_alone
from scripts.mtp_head import write
from scripts.tiny_drafters import GEMMA4, LAGUNA, MUSE, add_assistant, add_block
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
    return build_head(head_alone(head), head, network)


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
@pytest.mark.one_in(3)
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


# The model that each kind of blocks is tested with, and changes to its config.json.
FULL = {"layer_types": ["full_attention"] * 2}
QWEN = {"model_type": "qwen3"}
BLOCKS = {
    "dflash": (QWEN, FULL),
    "causal dflash": (QWEN, {**FULL, "dflash_query_causal": True}),
    "windows dflash": (QWEN, {}),
    "causal windows dflash": (QWEN, {"dflash_query_causal": True}),
    "dflash2": (QWEN, {}),
    "dspark": (QWEN, {}),
    "gemma4_dspark": (GEMMA4, {"attention_k_eq_v": False}),
    "windows muse": (MUSE, {}),
    "windows laguna": (LAGUNA, {}),
}


@pytest.fixture
def block_pair(tmp_path):
    """Return a network, and a directory with a drafter of a kind for it."""

    def pair(kind):
        shape, fields = BLOCKS[kind]
        model = build("llama", tmp_path / "model", **{"num_hidden_layers": 4, **shape})
        head = add_block(model, tmp_path / "head", kind.split()[-1], **fields)
        return loaded(model), head

    return pair


class Recorder:
    """A sampler of upstream that takes the likeliest token, and keeps all logits [places, V]."""

    def __init__(self):
        self.seen = []

    def __call__(self, logits):
        self.seen.append(logits[0] if logits.ndim == 3 else logits)
        return mx.argmax(logits, axis=-1)

    sample_proposal = __call__


def block_of(ours, readings, tokens, count):
    """Return the logits [places, B, V] of a block, each after the likeliest token before it."""
    block = ours.write(tokens, count, readings.seen(), mx.array(readings.lengths))
    found = []
    for place in range(count):
        found.append(block.logits_after(place, tokens))
        tokens = mx.argmax(found[-1], axis=-1)
    return mx.stack(found)


def states_of(counts, seed):
    return mx.random.normal((len(counts), max(counts), 128), key=mx.random.key(seed))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.one_in(3)
def test_a_block_is_that_of_upstream_for_rows_of_unlike_length(block_pair, kind):
    network, head = block_pair(kind)
    ours, (theirs, _) = built(head, network), load_drafter(str(head), "dflash")
    if theirs.embed_tokens is None:
        theirs.embed_tokens, theirs.lm_head = network.model.embed_tokens, network.lm_head
    caches = [theirs.make_cache() for _ in LENGTHS]
    readings = together([Readings([], [0]) for _ in LENGTHS])
    # Upstream's windows depend on how they were filled.
    steps = (LENGTHS,) if "windows" in kind else (LENGTHS, (1, 4, 2), (1, 1, 1))
    for counts in steps:
        states, tokens = states_of(counts, sum(counts)), mx.array([3, 5, 8])
        readings.add(ours.read(states, mx.array(readings.lengths)), counts)
        found = block_of(ours, readings, tokens, 4)
        for row, count in enumerate(counts):
            own, recorder = states[row : row + 1, :count], Recorder()
            theirs.draft_block(tokens[row].item(), own, caches[row], 5, recorder)
            one, other = found[:, row], mx.concatenate(recorder.seen)
            if kind == "dflash2":
                one, other = mx.sort(one, axis=-1)[:, -8:], mx.sort(other, axis=-1)
            assert mx.allclose(one, other, atol=2e-4), (counts, row)


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if "windows" in kind])
def test_what_is_read_in_pieces_is_the_same_as_what_is_read_at_once(block_pair, kind):
    network, head = block_pair(kind)
    ours = built(head, network)
    states, tokens = states_of(LENGTHS, 1), mx.array([3, 5, 8])
    whole = together([Readings([], [0]) for _ in LENGTHS])
    whole.add(ours.read(states, mx.array(whole.lengths)), LENGTHS)
    parts = [Readings([], [0]) for _ in LENGTHS]
    for row, count in enumerate(LENGTHS):
        for first in range(0, count, 4):
            piece = states[row : row + 1, first : min(first + 4, count)]
            new = ours.read(piece, mx.array(parts[row].lengths))
            parts[row].add(new, [piece.shape[1]])
    pieces = together(parts)
    assert mx.allclose(
        block_of(ours, whole, tokens, 4), block_of(ours, pieces, tokens, 4), atol=1e-4
    )
    alone = block_of(ours, pieces.of([2]), tokens[2:], 4)
    assert mx.allclose(alone[:, 0], block_of(ours, whole, tokens, 4)[:, 2], atol=1e-4)


BLOCK_REFUSALS = {
    "vocabulary": ({"vocab_size": 600}, "its vocab_size is 600, and 512 here"),
    "layers": ({"num_target_layers": 6}, "its num_target_layers is 6, and 4 here"),
    "place": ({"target_layer_ids": [1, 7]}, r"layers 1, 7 .target_layer_ids., and the model has 4"),
    "mask": ({"mask_token_id": 512}, "mask_token_id is 512 and its block_size 8, which"),
    "block": ({"block_size": 1}, "mask_token_id is 511 and its block_size 1, which"),
}


@pytest.mark.parametrize("case", BLOCK_REFUSALS)
def test_a_drafter_of_another_model_is_refused_by_its_field(block_pair, case):
    network, head = block_pair("dflash")
    fields, words = BLOCK_REFUSALS[case]
    config = json.loads((head / "config.json").read_text("utf-8"))
    nested = {name: each for name, each in fields.items() if name in config["dflash_config"]}
    config |= fields | {"dflash_config": config["dflash_config"] | nested}
    (head / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UnsupportedModelError, match=words):
        built(head, network)


def test_a_drafter_for_states_of_another_width_is_refused(block_pair, tmp_path):
    network, _ = block_pair("dflash")
    other = build("qwen3", tmp_path / "other", hidden_size=128)
    head = add_block(other, tmp_path / "wide", "dflash")
    with pytest.raises(UnsupportedModelError, match="its hidden_size is 128, and 64 here"):
        built(head, network)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "hy_v4_mtp"}, r".hy_v4_mtp. cannot draft: its model is refused"),
        ({"model_type": "qwen4_exp_mtp"}, r".qwen4_exp_mtp. cannot draft: .* in a batch$"),
        ({"model_type": "phi", "dflash_config": {}}, r".phi_dflash. cannot draft: no drafter of"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path, networks, config, words):
    write(tmp_path, config, {"norm.weight": mx.ones(4)})
    with pytest.raises(UnsupportedModelError, match=words):
        built(tmp_path, networks("llama"))


@pytest.mark.parametrize("kind", ["assistant", "dflash", "dspark", "dflash2"])
def test_a_quantised_drafter_writes_nearly_the_same(tmp_path, kind):
    shape = GEMMA4 if kind == "assistant" else QWEN
    model = build("llama", tmp_path / "model", **shape)
    network = loaded(model)
    if kind == "assistant":
        add_assistant(model, tmp_path / "head", has_clusters=True)
    else:
        add_block(model, tmp_path / "head", kind)
    exact = built(tmp_path / "head", network).probe(20)
    config = json.loads((tmp_path / "head" / "config.json").read_text("utf-8"))
    weights = mx.load(str(tmp_path / "head" / "model.safetensors"))
    for name in [name for name in weights if "proj." in name or "embed_tokens" in name]:
        parts = mx.quantize(weights[name], group_size=32, bits=8)
        path = name.removesuffix("weight")
        weights |= dict(zip((name, f"{path}scales", f"{path}biases"), parts, strict=True))
    write(tmp_path / "packed", config | {"quantization": {"group_size": 32, "bits": 8}}, weights)
    packed = built(tmp_path / "packed", network).probe(20)
    assert packed.shape == exact.shape
    either = mx.isinf(exact) | mx.isinf(packed)
    gaps = mx.where(either, 0.0, mx.abs(exact - packed))
    assert 0.0 < gaps.max().item() < 0.3
