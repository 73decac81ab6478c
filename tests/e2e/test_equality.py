"""A small part of `make speculation-equality`, and its verdicts on differences."""

import pytest

from benchmarks.equality.comparison import SUBJECTS, Answer, Verdict, compare, verdict

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]


@pytest.mark.parametrize("name", ["llama, draft model", "llama, EAGLE-3 head"])
@pytest.mark.one_in(2)
async def test_replies_in_a_storm_are_those_without_drafts(name):
    (subject,) = (each for each in SUBJECTS if each.name == name)
    result = await compare(subject, 100, seed=1)
    assert result.differences == result.ties == []
    assert result.tokens >= 100
    assert result.accepted > 0


def token(token_id, logprob=-0.5, *others):
    top = [{"id": token_id + n, "logprob": each} for n, each in enumerate((logprob, *others))]
    return {"id": token_id, "logprob": logprob, "top_logprobs": top}


def answer(*tokens, text="ba"):
    return Answer(tokens, (text, "", "", ""), len(tokens))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (answer(token(5, -0.5, -1.0), token(6, -0.5, -0.50001)), Verdict()),
        (
            answer(token(5, -0.5, -1.0), token(7, -0.5, -0.9)),
            Verdict(tie="token 1: 7 for 6, the likeliest 1.00e-05 apart"),
        ),
        (
            answer(token(8, -0.5, -1.0), token(6, -0.5, -0.50001)),
            Verdict(wrong="token 0: 8 for 5, the likeliest 5.00e-01 apart"),
        ),
        (
            answer(token(5, -0.5, -1.01), token(6, -0.5, -0.50001)),
            Verdict(wrong="log-probabilities 1.00e-02 apart"),
        ),
        (answer(token(5, -0.5, -1.0)), Verdict(wrong="1 tokens for 2, or other words")),
        (
            answer(token(5, -0.5, -1.0), token(6, -0.5, -0.50001), text="be"),
            Verdict(wrong="2 tokens for 2, or other words"),
        ),
    ],
)
def test_what_differs_is_told_and_a_tie_of_two_tokens_by_itself(found, told):
    expected = answer(token(5, -0.5, -1.0), token(6, -0.5, -0.50001))
    assert verdict(found, expected, is_greedy=True) == told


def test_a_drawn_token_that_differs_is_no_tie_and_small_distances_are_counted():
    expected = answer(token(6, -0.5, -0.50001))
    assert verdict(answer(token(7, -0.5, -0.9)), expected, is_greedy=False).wrong
    near = verdict(answer(token(6, -0.5, -0.50021)), expected, is_greedy=False)
    assert near.apart == pytest.approx(2e-4)
    assert not near.wrong
