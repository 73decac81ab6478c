from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from backend.core.request import SamplingParams
from backend.sampling.sampler import Sampler

pytestmark = pytest.mark.mlx

VOCAB = 64
MIXED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, seed=2),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.2, seed=4),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05, seed=5),
    SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05, seed=6),
    SamplingParams(temperature=1.0, top_k=1, seed=7),
]


def logits(rows: int, seed: int = 0) -> mx.array:
    return mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 3.0


def frequencies(params: SamplingParams, row: mx.array, draws: int = 4000) -> np.ndarray:
    counts = np.zeros(VOCAB)
    sampler = Sampler([replace(params, seed=seed) for seed in range(100)], VOCAB)
    for position in range(draws // 100):
        tokens = sampler.draw(mx.broadcast_to(row, (100, VOCAB)), [position] * 100)
        np.add.at(counts, np.array(tokens), 1)
    return counts / counts.sum()


def reference(params: SamplingParams, row: mx.array) -> np.ndarray:
    """The distribution by the textbook, in float64."""
    x = np.array(row[0], np.float64) / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p)
    keep = np.zeros(VOCAB, bool)
    k = params.top_k or VOCAB
    best = order[:k]
    before = np.cumsum(p[best]) - p[best]
    keep[best[before < params.top_p * p[best].sum()]] = True
    keep &= p >= params.min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


def test_rows_of_different_parameters_draw_as_they_would_alone():
    x = logits(len(MIXED))
    positions = [3, 1, 4, 1, 5, 9, 2, 6]
    together = Sampler(MIXED, VOCAB).draw(x, positions).tolist()
    alone = [
        Sampler([p], VOCAB).draw(x[i : i + 1], [positions[i]]).item() for i, p in enumerate(MIXED)
    ]
    assert together == alone


def test_the_order_of_rows_does_not_matter():
    x = logits(len(MIXED))
    forward = Sampler(MIXED, VOCAB).draw(x, list(range(8))).tolist()
    back = Sampler(MIXED[::-1], VOCAB).draw(x[::-1], list(range(8))[::-1]).tolist()
    assert forward == back[::-1]


def test_temperature_zero_and_top_k_one_are_greedy():
    x = logits(2)
    greedy = [SamplingParams(seed=1), SamplingParams(temperature=2.0, top_k=1, seed=2)]
    assert Sampler(greedy, VOCAB).draw(x, [0, 0]).tolist() == mx.argmax(x, axis=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e-5])
def test_a_temperature_next_to_zero_is_as_good_as_greedy(temperature):
    x = logits(1) * 10.0
    params = SamplingParams(temperature=temperature, seed=5)
    assert Sampler([params], VOCAB).draw(x, [0]).item() == mx.argmax(x).item()


def test_a_seed_and_a_position_determine_the_draw():
    x = mx.broadcast_to(logits(1), (3, VOCAB))
    params = [SamplingParams(temperature=1.5, seed=s) for s in (7, 7, 8)]
    draws = [Sampler(params, VOCAB).draw(x, [n, n, n]).tolist() for n in range(20)]
    assert all(a == b for a, b, _ in draws)
    assert any(a != c for a, _, c in draws)
    assert len({a for a, _, _ in draws}) > 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=7),
        SamplingParams(temperature=1.2, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_filtered_distribution(params):
    row = logits(1)
    expected, seen = reference(params, row), frequencies(params, row)
    assert not seen[expected == 0].any()
    assert np.abs(seen - expected).max() < 0.05


def test_xtc_excludes_all_but_the_least_likely_of_the_top_choices():
    row = mx.array([[3.0, 2.9, 2.8, 0.0] + [-9.0] * (VOCAB - 4)])
    always = SamplingParams(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1)
    seen = frequencies(always, row, draws=400)
    assert seen[0] == seen[1] == 0
    assert seen[2] > 0.8


def test_xtc_leaves_a_token_when_top_p_keeps_only_one():
    row = mx.array([[9.0, 1.0] + [0.0] * (VOCAB - 2)])
    params = SamplingParams(temperature=1.0, top_p=0.1, xtc_probability=1.0, xtc_threshold=0.05)
    assert Sampler([params], VOCAB).draw(row, [0]).item() == 0


def test_a_neighbour_that_looks_at_more_tokens_changes_nothing_even_between_equal_ones():
    vocab_size = 20_000
    x = mx.random.randint(-9, 9, (2, vocab_size), key=mx.random.key(3)).astype(mx.float32)
    few = SamplingParams(temperature=1.0, top_k=3, top_p=0.9, seed=1)
    many = SamplingParams(temperature=1.0, top_k=500, seed=2)
    for position in range(20):
        alone = Sampler([few], vocab_size).draw(x[:1], [position]).item()
        together = Sampler([few, many], vocab_size).draw(x, [position, 0])
        assert together[0].item() == alone


def test_a_token_keeps_its_noise_when_others_of_nearly_its_logit_change_their_order():
    x = mx.round(logits(1))
    params = [SamplingParams(temperature=1.0, top_k=40, seed=seed) for seed in range(100)]
    near = x + mx.random.normal(x.shape, key=mx.random.key(9)) * 1e-6
    draws = [
        Sampler(params, VOCAB).draw(mx.broadcast_to(each, (100, VOCAB)), [0] * 100).tolist()
        for each in (x, near)
    ]
    assert draws[0] == draws[1]


def test_top_k_over_the_vocabulary_means_all():
    x = logits(1)
    wide = SamplingParams(temperature=1.0, top_k=10 * VOCAB, seed=3)
    plain = SamplingParams(temperature=1.0, seed=3)
    draws = [Sampler([p], VOCAB).draw(x, [0]).item() for p in (wide, plain)]
    assert draws[0] == draws[1]
