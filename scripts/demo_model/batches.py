"""Turns samples into weighted token batches of about equal cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import mlx.core as mx
import numpy as np
from conversations import assert_unseen, draw_sample, draw_short_sample
from demo_tokenizer import END_OF_TEXT, TURN_END
from samples import Sample, document
from transformers import PreTrainedTokenizerFast

_PROMPT_WEIGHT = 0.02
_DOCUMENT_WEIGHT = 0.3
DOCUMENT_SHARE = 0.04
_CHUNK = 256

Batch = tuple[mx.array, mx.array]
"""Tokens and weights, both of shape (rows, width)."""


@dataclass(frozen=True)
class Row:
    """Tokens of one training text, with the weight of each as a target."""

    tokens: list[int]
    weights: list[float]


def prompt_text(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> str:
    """Render the conversation of `sample` up to the turn to learn."""
    return str(
        tokenizer.apply_chat_template(
            sample.messages,
            tools=sample.tools,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
            tokenize=False,
        )
    )


def sample_row(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> Row:
    """Return the tokens of a conversation whose last turn is to be learnt."""
    prompt, target = prompt_text(tokenizer, sample), sample.target + TURN_END
    assert_unseen(prompt + target)
    before, after = tokenizer.encode(prompt), tokenizer.encode(target)
    return Row(before + after, [_PROMPT_WEIGHT] * len(before) + [1.0] * len(after))


def _document_row(tokenizer: PreTrainedTokenizerFast, text: str) -> Row:
    assert_unseen(text)
    tokens = tokenizer.encode(text + END_OF_TEXT)
    return Row(tokens, [_DOCUMENT_WEIGHT] * len(tokens))


def _draw_row(tokenizer: PreTrainedTokenizerFast, rng: Random, *, short: bool) -> Row:
    if rng.random() < DOCUMENT_SHARE:
        return _document_row(tokenizer, document(rng))
    return sample_row(tokenizer, draw_short_sample(rng) if short else draw_sample(rng))


def _stacked(rows: list[Row]) -> Batch:
    """Pad rows at the end; padding has weight 0."""
    width = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    weights = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        weights[i, : len(row.tokens)] = row.weights
    return mx.array(tokens), mx.array(weights)


def _cut(rows: list[Row], budget: int) -> list[list[Row]]:
    """Cut rows sorted by length into batches of at most `budget` padded tokens."""
    batches: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        if batches[-1] and len(row.tokens) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: Random, budget: int, *, short: bool
) -> Iterator[Batch]:
    """Yield batches forever, fresh samples each time."""
    return batches_of(lambda: _draw_row(tokenizer, rng, short=short), rng, budget)


def batches_of(draw: Callable[[], Row], rng: Random, budget: int) -> Iterator[Batch]:
    """Yield batches of drawn rows forever.

    Args:
        draw: Returns another row each time.
        rng: Orders the batches.
        budget: Maximum padded tokens of a batch.
    """
    while True:
        cut = _cut([draw() for _ in range(_CHUNK)], budget)
        rng.shuffle(cut)
        for group in cut:
            yield _stacked(group)
