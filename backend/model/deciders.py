"""Decision models of mlx-vlm that read a text in one pass: one way to ask them all."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
from mlx import nn

from backend.core.scoring import QuestionType
from backend.model.checkpoint.upstream import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Texts with questions, padded at the end: B of T tokens, with K options at most.

    Attributes:
        ids: [B, T].
        mask: [B, T] 1 for the tokens of a text.
        options: [B, K, 2] where each begins and ends.
        is_option: [B, K].
        questions: [B, 2] where each question begins and ends.
        types: Of the questions.
    """

    ids: mx.array
    mask: mx.array
    options: mx.array
    is_option: mx.array
    questions: mx.array
    types: Sequence[QuestionType]


@contextmanager
def without_towers(name: str, towers: Mapping[str, str]) -> Iterator[None]:
    """Have mlx-vlm build and load networks of a family without towers: questions bring no media.

    Args:
        name: Of the module of the family.
        towers: Prefixes of weights by the class of each tower.
    """
    family = importlib.import_module(f"mlx_vlm.models.{name}.{name}")
    known = {tower: getattr(family, tower) for tower in towers}
    sanitize, prefixes = family.Model.sanitize, tuple(towers.values())

    def sanitize_rest(network: Network, weights: Mapping[str, mx.array]) -> object:
        rest = {key: each for key, each in weights.items() if not key.startswith(prefixes)}
        return sanitize(network, rest)

    try:
        vars(family).update(dict.fromkeys(towers, lambda *_: nn.Module()))
        family.Model.sanitize = sanitize_rest
        yield
    finally:
        vars(family).update(known)
        family.Model.sanitize = sanitize


class _Wrapper:
    """Runs a network; its settings and weights are those of the network.

    Attributes:
        types: Kinds of questions in the order of the network's numbers.
    """

    types: ClassVar = (QuestionType.CHOICE, QuestionType.SCORE, QuestionType.BOOL)

    def __init__(self, network: Network) -> None:
        self._network = network
        self.config = network.config

    def parameters(self) -> object:
        return self._network.parameters()

    @property
    def state(self) -> object:
        return self._network.state

    def _numbers(self, asked: Asked) -> mx.array:
        return mx.array([self.types.index(each) for each in asked.types])


class Laya(_Wrapper):
    """Reads masks before the options."""

    def states(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Return the hidden states [B, T, D] of texts."""
        found: mx.array = self._network.encoder(ids, mask).last_hidden_state
        return found

    def answer(self, asked: Asked) -> tuple[mx.array, mx.array | None]:
        """Return the logits [B, K] of all options, and probabilities [B] of acting on them."""
        logits, act = self._network(
            asked.ids, asked.mask, asked.options[..., 0], asked.is_option, self._numbers(asked)
        )
        return logits, mx.softmax(act.astype(mx.float32), axis=-1)[:, 0]


class D1Omni(_Wrapper):
    """Reads masks before the options."""

    def states(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Return the hidden states [B, T, D] of texts."""
        trunk = self._network.encoder
        found: mx.array = trunk(self._embedded(ids), mask == 1, [0] * len(ids))
        return found

    def answer(self, asked: Asked) -> tuple[mx.array, mx.array | None]:
        """Return the logits [B, K] of all options."""
        embedded, marks = self._embedded(asked.ids), asked.options[..., 0]
        lengths, none = asked.mask.sum(axis=-1).tolist(), [0] * len(asked.ids)
        logits = self._network(
            *(embedded, asked.mask == 1, none, lengths, marks, asked.is_option),
            self._numbers(asked),
        )
        return logits, None

    def _embedded(self, ids: mx.array) -> mx.array:
        trunk = self._network.encoder
        found: mx.array = trunk.embed_tokens(ids).astype(trunk.embedding_norm.weight.dtype)
        return found


class Clef(_Wrapper):
    """Reads a question and options with its head, one text after another.

    Of its tower it keeps the weights that tell their type.
    """

    types = (QuestionType.BOOL, QuestionType.CHOICE, QuestionType.SCORE)

    def __init__(self, network: Network) -> None:
        """Wrap a network, which loses its tower."""
        super().__init__(network)
        tower, network.vision_tower = network.vision_tower, nn.Module()
        network.vision_tower.patch_embed = tower.patch_embed

    def states(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Return the hidden states [B, T, D] of texts, which begin before their padding."""
        del mask
        decoder = self._network.language_model
        positions, _ = decoder.get_rope_index(ids, None, None)
        found: mx.array = decoder.model(ids, position_ids=positions)
        return found

    def answer(self, asked: Asked) -> tuple[mx.array, mx.array | None]:
        """Return the logits [B, K] of all options."""
        numbers, width = self._numbers(asked), asked.options.shape[1]
        rows = []
        for i, length in enumerate(asked.mask.sum(axis=-1).tolist()):
            count = int(asked.is_option[i].sum())
            question = tuple(asked.questions[i].tolist())
            options = [tuple(each) for each in asked.options[i, :count].tolist()]
            ids = asked.ids[i : i + 1, :length]
            row = self._network(ids, [(question, count)], options, numbers[i : i + 1])
            rows.append(mx.pad(row, (0, width - count)))
            mx.eval(rows[-1])
        return mx.stack(rows), None
