"""Wraps an mlx-vlm 0.7 model as a network for the engine, with its towers' output for media.

The towers and the language model are mlx-vlm's; its generation, batches and prompt caches are
not used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MethodType
from typing import Any, Self, TypeAlias

import mlx.core as mx

from backend.model.checkpoint.upstream import Network
from backend.model.vision.media_processor import NO_TOKEN

_OVERLAY = "_apply_blockwise_bidirectional_overlay"


def mend(language_model: Network) -> None:
    """Let a language model see whole pictures even after cached tokens."""
    decoder = getattr(language_model, "model", None)
    if hasattr(decoder, _OVERLAY):
        setattr(decoder, _OVERLAY, MethodType(_overlaid, decoder))


def _overlaid(decoder: Network, mask: mx.array, token_types: mx.array | None) -> mx.array:
    """Return a mask [..., T, S] in which the last T keys of each picture see each other.

    Args:
        mask: True where a query may look; the last T of S keys are the queries' own.
        token_types: 1 and 2 for tokens of pictures and videos, [B, T].
    """
    queries = mask.shape[-2]
    if token_types is None or token_types.shape[1] != queries:
        return mask
    blocks = decoder._block_sequence_ids_for_mask(token_types)  # noqa: SLF001 (upstream's own)
    same = (blocks[:, :, None] != -1) & (blocks[:, :, None] == blocks[:, None, :])
    earlier = mx.zeros((*same.shape[:2], mask.shape[-1] - queries), mx.bool_)
    return mask | mx.concatenate([earlier, same], axis=-1)[:, None]


class RopePositions:
    """Stored among the KV caches of a row or a batch, and moves with their rows.

    Attributes:
        counts_only: Nothing here needs to be stored: tokens and media determine it.
    """

    counts_only = True

    def __init__(self, upcoming: Sequence[int] = (0,)) -> None:
        self.upcoming = list(upcoming)

    def take(self, count: int) -> mx.array:
        """Return the next positions, [B, count], and advance past them."""
        first = mx.array(self.upcoming, mx.int32)[:, None]
        self.upcoming = [position + count for position in self.upcoming]
        return first + mx.arange(count, dtype=mx.int32) if count > 1 else first

    @classmethod
    def merge(cls, rows: Sequence[Self]) -> Self:
        """Combine several rows."""
        return cls([position for row in rows for position in row.upcoming])

    def extend(self, other: Self) -> None:
        """Append rows."""
        self.upcoming += other.upcoming

    def filter(self, staying: Sequence[int]) -> None:
        """Keep some rows."""
        self.upcoming = [self.upcoming[index] for index in staying]

    def extract(self, index: int) -> "RopePositions":
        """Return a single row."""
        return RopePositions([self.upcoming[index]])

    def empty(self) -> bool:
        """Always true: it never holds keys and values."""
        return True

    @property
    def nbytes(self) -> int:
        """Size of the arrays: zero."""
        return 0

    @property
    def state(self) -> list[mx.array]:
        """Empty: there is nothing to evaluate."""
        return []


# One upstream cache object per layer.
Caches: TypeAlias = list[Any]
# Arrays in nested dicts and lists, as MLX keeps them.
Arrays: TypeAlias = Any
# NumPy arrays, or nested lists of them.
Untyped: TypeAlias = Any

# Results of `get_input_embeddings` for whole prompts, which this engine handles itself.
_NOT_FED = ("attention_mask_4d", "attention_mask", "rope_deltas")
# Tower inputs that also tell the language model the type of each token.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
# Ways from picture to text other than replacing tokens.
_CROSSINGS = {
    "cross_attention_states": "cross attention",
    "decoder_inputs_embeds": "a separate encoder",
    "pos_hw": "positions of two axes for every token",
}
# Where some models leave the positions of the last embedded prompt.
_LEFT_POSITIONS = "_position_ids"
# Packages of mlx-vlm that take positions with as many axes as `get_rope_index` returns for text;
# the others always take three.
_STRICT = frozenset({"cohere_compass", "minimax_m3_vl"})
# Kept by models that read text with other weights when there are media.
_OTHER_WEIGHTS = "_base_weights"
# The setting with the id of a medium's placeholder; in some families it is of no token.
_PLACEHOLDER = "image_token_index"
_DEEPSTACK = "deepstack_visual_embeds"
_AXES = 3
_PROBE = (0, 1, 2, 3)


class NotEmbeddableError(Exception):
    """A model takes media other than by replacing tokens."""


class OtherCountError(NotEmbeddableError):
    """A medium does not have as many embeddings as tokens; carries their number."""

    def __init__(self, embeddings: int, tokens: int) -> None:
        super().__init__(f"mlx-vlm makes {embeddings} embeddings for {tokens} tokens")
        self.embeddings = embeddings


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """Input of the language model that replaces a medium's tokens; evaluated.

    Attributes:
        per_token: Keyword arguments [1, T, ...], including the embeddings.
        positions: M-RoPE positions, [3, 1, T] or [1, T], from 0; `None` without M-RoPE.
        deepstack: Per layer that takes them, features [V, D] of the V visual tokens.
        is_visual: Marks the visual tokens, [1, T].
    """

    per_token: Mapping[str, mx.array]
    positions: mx.array | None
    deepstack: Sequence[mx.array]
    is_visual: mx.array | None

    @property
    def rope_length(self) -> int | None:
        """Number of positions that the medium occupies; `None` without M-RoPE."""
        return None if self.positions is None else int(self.positions.max().item()) + 1

    @property
    def nbytes(self) -> int:
        """Size of all arrays, in bytes."""
        arrays = [*self.per_token.values(), *self.deepstack]
        return sum(array.nbytes for array in arrays)

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """Return the keyword arguments for a range of the tokens, except positions."""
        given: dict[str, Any] = {k: v[:, start:stop] for k, v in self.per_token.items()}
        if self.is_visual is None or not self.deepstack:
            return given
        before = int(self.is_visual[:, :start].sum().item())
        count = int(self.is_visual[:, start:stop].sum().item())
        if count:
            given["visual_pos_masks"] = self.is_visual[:, start:stop]
            given[_DEEPSTACK] = [layer[before : before + count] for layer in self.deepstack]
        return given


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A range of a medium's tokens: from `start` up to, not including, `stop`."""

    features: MediaFeatures
    start: int
    stop: int


class VisionNetwork:
    """The language model of a model with towers, which also takes media."""

    def __init__(self, model: Network) -> None:
        self.model = model
        self._has_rope_positions = hasattr(model.language_model, "get_rope_index")
        probe = _positions_of_text(model.language_model) if self._has_rope_positions else None
        self._axes_come_last = probe is not None and probe.shape == (1, len(_PROBE), _AXES)
        package = type(model.language_model).__module__.split(".")[-2]
        has_one_axis = package in _STRICT and probe is not None and probe.ndim < _AXES
        self._spread = _unchanged if has_one_axis else _on_all_axes
        mend(model.language_model)

    @property
    def language_model(self) -> Network:
        """The part that turns tokens, or their replacements, into logits."""
        return self.model.language_model

    @property
    def state(self) -> Arrays:
        """All arrays of the model."""
        return self.model.state

    def parameters(self) -> Arrays:
        """Return the weights as a tree."""
        return self.model.parameters()

    def named_modules(self) -> list[tuple[str, Network]]:
        """Return all modules of the model with their places."""
        modules: list[tuple[str, Network]] = self.model.named_modules()
        return modules

    def make_cache(self) -> Caches:
        """Return the empty caches of one sequence."""
        from mlx_vlm.models.cache import make_prompt_cache

        caches: Caches = make_prompt_cache(self.language_model)
        return [*caches, RopePositions()] if self._has_rope_positions else caches

    def __call__(self, inputs: mx.array, cache: Caches) -> mx.array:
        """Append tokens [B, T] to the caches and return the logits [B, T, V]."""
        return self._forward(inputs, cache, {})

    def feed_media(
        self, inputs: mx.array, cache: Caches, part: MediaPart, position: int
    ) -> mx.array:
        """Append the tokens of a part of a medium; returns logits as `__call__` does.

        Args:
            inputs: Token ids of one row, [1, T].
            position: Position of the medium's first token.
        """
        arguments = part.features.arguments(part.start, part.stop)
        positions = part.features.positions
        if positions is not None:
            arguments["position_ids"] = positions[..., part.start : part.stop] + position
        return self._forward(inputs, cache, arguments)

    def require_decoder_only(self) -> None:
        """Check that text alone reaches the logits; computes next to nothing."""
        found = self.model.get_input_embeddings(mx.array([_PROBE]), None).to_dict()
        _require_in_place({k: v for k, v in found.items() if v is not None}, len(_PROBE))

    def reply_of_upstream(
        self, token_ids: Sequence[int], inputs: Mapping[str, Any], count: int
    ) -> tuple[list[int], mx.array]:
        """Return mlx-vlm's own greedy tokens and their log-probabilities [count, V].

        Args:
            inputs: Output of the processor for all media in it, by mlx-vlm's names.
        """
        from mlx_vlm.generate.ar import generate_step

        tokens, pixels, arrays = self._upstream_inputs(token_ids, inputs)
        steps = generate_step(
            tokens, self.model, pixels, mx.ones_like(tokens), max_tokens=count, **arrays
        )
        reply = list(islice(steps, count))
        steps.close()
        self._forget_positions()
        return [int(token) for token, _ in reply], mx.stack([probs for _, probs in reply])

    def require_media_in_place(self, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """Check that a medium replaces its tokens; computes next to nothing."""
        if getattr(self.model, _OTHER_WEIGHTS, None):
            raise NotEmbeddableError("the model reads the text around them with other weights")
        self._found(token_ids, inputs)

    def embed_media(self, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> MediaFeatures:
        """Run the towers over one medium.

        Args:
            inputs: Arrays by mlx-vlm's names.

        Raises:
            NotEmbeddableError: The medium does not replace these tokens.
        """
        given = self._found(token_ids, inputs)
        types = {name: mx.array(inputs[name]) for name in _TOKEN_TYPES if name in inputs}
        if _DEEPSTACK in given:
            given[_DEEPSTACK] = getattr(given[_DEEPSTACK], "embeddings", given[_DEEPSTACK])
        # Some models return features of all tokens, [1, T, layers, D], fed like embeddings.
        is_dense = isinstance(given.get(_DEEPSTACK), mx.array)
        is_visual = None if is_dense else given.pop("visual_pos_masks", None)
        features = MediaFeatures(
            positions=self._positions(given.pop("position_ids", None)),
            deepstack=() if is_dense else tuple(given.pop(_DEEPSTACK, ())),
            is_visual=is_visual,
            per_token=given | types,
        )
        mx.eval(list(features.per_token.values()), features.positions, list(features.deepstack))
        return features

    def may_split_media(self, features: MediaFeatures) -> bool:
        """Tell whether a medium's tokens may be fed in several passes."""
        from mlx_vlm.generate.common import _chunked_prefill_enabled

        return bool(
            _chunked_prefill_enabled(
                self.model,
                inputs_embeds=features.per_token["inputs_embeds"],
                prefill_kwargs=dict(features.per_token),
            )
        )

    def _found(self, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the towers' output, lazily, as arguments of the language model."""
        tokens, pixels, arrays = self._upstream_inputs(token_ids, inputs)
        self._forget_positions()
        found = self.model.get_input_embeddings(
            tokens, pixels, mask=mx.ones_like(tokens), **arrays
        ).to_dict()
        given = {k: v for k, v in found.items() if v is not None and k not in _NOT_FED}
        _require_in_place(given, len(token_ids))
        if self._has_rope_positions and "position_ids" not in given:
            given["position_ids"] = self._left_positions(tokens, arrays)
        self._forget_positions()
        return given

    def _upstream_inputs(
        self, token_ids: Sequence[int], inputs: Mapping[str, Any]
    ) -> tuple[mx.array, Arrays | None, dict[str, Arrays]]:
        """Return tokens [1, T], pixels and other arrays as mlx-vlm takes them."""
        arrays = {name: _on_device(array) for name, array in inputs.items()}
        pixels = arrays.pop("pixel_values", None)
        tokens = arrays.pop("input_ids", mx.array([token_ids]))
        placeholder = getattr(self.model.config, _PLACEHOLDER, NO_TOKEN)
        if placeholder < 0:
            tokens = mx.where(tokens == NO_TOKEN, placeholder, tokens)
        return tokens, pixels, arrays

    def _left_positions(self, tokens: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
        """Return the positions that a model stores internally, or computes only when called."""
        left = getattr(self.language_model, _LEFT_POSITIONS, None)
        if left is not None:
            return left
        grids = (inputs.get(name) for name in ("image_grid_thw", "video_grid_thw"))
        positions, _ = self.language_model.get_rope_index(tokens, *grids, mx.ones_like(tokens))
        return positions

    def _forget_positions(self) -> None:
        if hasattr(self.language_model, _LEFT_POSITIONS):
            setattr(self.language_model, _LEFT_POSITIONS, None)

    def _positions(self, found: mx.array | None) -> mx.array | None:
        """Return positions as [3, 1, T], starting at 0 regardless of earlier tokens."""
        if found is None or not self._has_rope_positions:
            return None
        if self._axes_come_last:
            found = found.transpose(2, 0, 1)
        return found if found.ndim == _AXES else self._spread(found)

    def _forward(self, inputs: mx.array, cache: Caches, arguments: dict[str, Any]) -> mx.array:
        layers = cache
        # Some models would give this prompt the previous prompt's positions.
        self._forget_positions()
        if self._has_rope_positions:
            layers, counter = cache[:-1], cache[-1]
            positions = counter.take(inputs.shape[1])
            arguments.setdefault("position_ids", self._spread(positions))
            if self._axes_come_last:
                arguments["position_ids"] = arguments["position_ids"].transpose(1, 2, 0)
        output = self.language_model(inputs, cache=layers, **arguments)
        # Some models replace entries of the given list.
        cache[: len(layers)] = layers
        logits: mx.array = output.logits
        return logits


def _on_device(array: Untyped) -> Arrays:
    """Convert a NumPy array, or a list of arrays of different shapes, to MLX."""
    if isinstance(array, list):
        return [_on_device(each) for each in array]
    return _setting(array) or mx.array(array)


def _setting(array: Untyped) -> str | None:
    """Return the text setting that a processor passes among its arrays, if this is one."""
    is_text = getattr(array, "dtype", None) is not None and array.dtype.kind == "U"
    return str(array.item()) if is_text and array.size == 1 else None


def _unchanged(positions: mx.array) -> mx.array:
    return positions


def _on_all_axes(positions: mx.array) -> mx.array:
    return mx.broadcast_to(positions[None], (_AXES, *positions.shape))


def _positions_of_text(language_model: Network) -> mx.array | None:
    """Return the positions that a model gives a few tokens, [3, 1, T], [1, T, 3] or [1, T].

    Some families share another one's language model but lack the tower settings that
    `get_rope_index` reads: their positions count tokens.
    """
    try:
        positions, *_ = language_model.get_rope_index(mx.array([_PROBE]))
    except AttributeError:
        return None
    found: mx.array = positions
    return found


def _require_in_place(given: Mapping[str, Any], count: int) -> None:
    if crossing := next((way for name, way in _CROSSINGS.items() if name in given), None):
        raise NotEmbeddableError(f"they reach the text by {crossing}")
    if (embedded := given["inputs_embeds"].shape[1]) != count:
        raise OtherCountError(embedded, count)
