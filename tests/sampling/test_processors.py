import mlx.core as mx
import numpy as np
import pytest

from backend.core.request import SamplingParams
from backend.sampling.sampler import History, LogitsAdjuster

pytestmark = pytest.mark.mlx

VOCAB = 16


def expected(params: SamplingParams, seen: list[int], row: np.ndarray) -> np.ndarray:
    """Penalties and biases by the textbook."""
    window = params.penalty_window
    seen = seen[-window:] if window else seen
    out = row.astype(np.float64).copy()
    for token in range(VOCAB):
        count = seen.count(token)
        if count:
            scale = params.repetition_penalty
            out[token] = out[token] / scale if out[token] > 0 else out[token] * scale
            out[token] -= params.presence_penalty + count * params.frequency_penalty
        out[token] += params.logit_bias.get(token, 0.0)
    return out


@pytest.mark.parametrize("window", [0, 1, 2, 5, 100])
def test_penalties_follow_the_tokens_that_are_fed(window):
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        penalty_window=window,
        logit_bias={3: 2.0, 5: -100.0},
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 6).tolist()
    adjuster = LogitsAdjuster([History(params, tokens, len(tokens) - 1)], VOCAB)
    for _ in range(8):
        row = rng.normal(size=VOCAB).astype(np.float32)
        got = np.array(adjuster.adjust(mx.array(row)[None], mx.array(tokens[-1:])))[0]
        np.testing.assert_allclose(got, expected(params, tokens, row), rtol=1e-5, atol=1e-5)
        tokens.append(int(rng.integers(0, VOCAB)))


def test_the_whole_prompt_counts_as_seen():
    params = SamplingParams(presence_penalty=10.0)
    adjuster = LogitsAdjuster([History(params, [1, 2, 3], 2)], VOCAB)
    out = adjuster.adjust(mx.zeros((1, VOCAB)), mx.array([3])).tolist()[0]
    assert [i for i, x in enumerate(out) if x < 0] == [1, 2, 3]


HUGE = 3.4e38


@pytest.mark.parametrize("repetition", [1e-45, 1.0, HUGE])
@pytest.mark.parametrize("frequency", [-HUGE, 0.0, HUGE])
@pytest.mark.parametrize("presence", [-HUGE, HUGE])
def test_no_penalty_or_bias_makes_a_logit_that_is_no_number(repetition, frequency, presence):
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={1: HUGE, 2: -HUGE, 3: HUGE},
    )
    adjuster = LogitsAdjuster([History(params, [1, 1, 2, 2, 4, 4], 6)], VOCAB)
    out = adjuster.adjust(mx.array([[1.0, -1.0] * (VOCAB // 2)]), mx.array([4]))
    assert np.isfinite(np.array(out)).all()


def test_rows_that_did_not_ask_are_left_alone():
    histories = [
        History(SamplingParams(), [1], 1),
        History(SamplingParams(logit_bias={2: 5.0}), [1], 1),
    ]
    logits = mx.zeros((2, VOCAB))
    out = LogitsAdjuster(histories, VOCAB).adjust(logits, mx.array([0, 0]))
    assert out[0].tolist() == [0.0] * VOCAB
    assert out[1, 2].item() == 5.0
    assert not logits.any().item()


def test_nobody_asking_costs_nothing():
    adjuster = LogitsAdjuster([History(SamplingParams(), [1], 1)], VOCAB)
    logits = mx.zeros((1, VOCAB))
    assert adjuster.adjust(logits, mx.array([0])) is logits


@pytest.mark.parametrize("window", [0, 3])
def test_several_tokens_in_a_pass_are_adjusted_as_one_after_another(window):
    params = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.25,
        penalty_window=window,
        logit_bias={3: 2.0},
    )
    histories = [[1, 2, 2], [7], [4, 5, 6, 4]]
    inputs = [[8, 9, 8], [7], [4, 10]]
    kept = [2, 1, 1]
    kinds = [params, SamplingParams(), params]

    def adjuster():
        made = [
            History(kind, [*own, *fed], len(own))
            for kind, own, fed in zip(kinds, histories, inputs, strict=True)
        ]
        return LogitsAdjuster(made, VOCAB)

    logits = mx.random.normal((7, VOCAB), key=mx.random.key(0))
    together = adjuster()
    found = together.adjust_all(logits[:6], inputs)
    together.keep(kept)
    single = adjuster()
    rows = [[0, 1, 2], [3, 3, 3], [4, 5, 5]]
    for place in range(2):
        fed = [own[min(place, len(own) - 1)] for own in inputs]
        expected = single.adjust(logits[mx.array([row[place] for row in rows])], mx.array(fed))
        for row, own in enumerate(inputs):
            if place < len(own):
                assert mx.array_equal(found[rows[row][place]], expected[row])
    last = mx.broadcast_to(logits[6:], (3, VOCAB))
    after = together.adjust(last, mx.array([9, 7, 11]))
    alone = [History(kinds[0], [1, 2, 2, 8, 9, 9], 5), History(kinds[2], [4, 5, 6, 4, 4, 11], 5)]
    expected = LogitsAdjuster(alone, VOCAB).adjust(last[:2], mx.array([9, 11]))
    assert mx.array_equal(after[mx.array([0, 2])], expected)
    assert mx.array_equal(after[1], last[1])
