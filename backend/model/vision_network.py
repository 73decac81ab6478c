"""A model of mlx-vlm 0.7 as the engine takes networks, and what its towers make of media.

The towers and the language model are mlx-vlm's; its generation, batches and prompt caches are not
used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from backend.model.rope_positions import RopePositions
from backend.model.upstream import Network

# One upstream cache object per layer.
Caches: TypeAlias = list[Any]
# Arrays in nested dicts and lists, as MLX keeps them.
Arrays: TypeAlias = Any

# What `get_input_embeddings` gives for whole prompts, and this engine has its own way for.
_NOT_FED = ("attention_mask_4d", "attention_mask", "rope_deltas")
# Inputs of the tower that tell the language model, too, which tokens are what.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
# Ways from picture to text other than in the place of tokens.
_CROSSINGS = ("cross_attention_states", "decoder_inputs_embeds", "pos_hw")


class NotEmbeddableError(Exception):
    """A model takes media on another way than in the place of tokens."""


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """What the language model reads in the place of a medium's tokens; evaluated.

    Attributes:
        per_token: Keyword arguments [1, T, ...], the embeddings among them.
        positions: By M-RoPE, [3, 1, T], the first token's being 0; `None` without M-RoPE.
        deepstack: For each layer that takes some, features [V, D] of the V visual tokens.
        is_visual: Which tokens those are, [1, T].
    """

    per_token: Mapping[str, mx.array]
    positions: mx.array | None
    deepstack: Sequence[mx.array]
    is_visual: mx.array | None

    @property
    def rope_length(self) -> int | None:
        """By how much the medium advances the position; `None` without M-RoPE."""
        return None if self.positions is None else int(self.positions.max().item()) + 1

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        arrays = [*self.per_token.values(), *self.deepstack]
        return sum(array.nbytes for array in arrays)

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """Return the keyword arguments for some of the tokens, all but positions."""
        given: dict[str, Any] = {k: v[:, start:stop] for k, v in self.per_token.items()}
        if self.is_visual is None or not self.deepstack:
            return given
        before = int(self.is_visual[:, :start].sum().item())
        count = int(self.is_visual[:, start:stop].sum().item())
        if count:
            given["visual_pos_masks"] = self.is_visual[:, start:stop]
            given["deepstack_visual_embeds"] = [
                layer[before : before + count] for layer in self.deepstack
            ]
        return given


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Some of a medium's tokens: from `start` on, up to `stop`."""

    features: MediaFeatures
    start: int
    stop: int


class VisionNetwork:
    """The language model of a model with towers, and the way of media into it."""

    def __init__(self, model: Network) -> None:
        """Wrap a model of mlx-vlm."""
        self.model = model
        self._has_rope_positions = hasattr(model.language_model, "get_rope_index")

    @property
    def language_model(self) -> Network:
        """The part that turns tokens, or what stands in their place, into logits."""
        return self.model.language_model

    @property
    def state(self) -> Arrays:
        """All arrays of the model."""
        return self.model.state

    def parameters(self) -> Arrays:
        """Return the weights as a tree."""
        return self.model.parameters()

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
        """Append tokens that stand for a part of a medium; returns logits as `__call__` does.

        Args:
            inputs: Of one row, [1, T].
            cache: Of that row.
            part: What stands in their place.
            position: Where the medium's first token stands.
        """
        arguments = part.features.arguments(part.start, part.stop)
        if part.features.positions is not None:
            arguments["position_ids"] = (
                part.features.positions[..., part.start : part.stop] + position
            )
        return self._forward(inputs, cache, arguments)

    def require_media_in_place(self, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """Check that a medium comes in the place of its tokens; computes next to nothing.

        Raises:
            NotEmbeddableError: It does not.
        """
        self._found(token_ids, inputs)

    def embed_media(self, token_ids: Sequence[int], inputs: Mapping[str, Any]) -> MediaFeatures:
        """Run the towers over one medium.

        Args:
            token_ids: The tokens that stand for it, as the processor made them.
            inputs: Arrays, by the names that mlx-vlm gives them.

        Raises:
            NotEmbeddableError: The medium does not come in the place of these tokens.
        """
        given = self._found(token_ids, inputs)
        types = {name: mx.array(inputs[name]) for name in _TOKEN_TYPES if name in inputs}
        features = MediaFeatures(
            positions=self._positions(given.pop("position_ids", None)),
            deepstack=tuple(given.pop("deepstack_visual_embeds", ())),
            is_visual=given.pop("visual_pos_masks", None),
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
        """Return what the towers give, lazily, by the names of the language model's arguments."""
        tokens = mx.array([token_ids])
        arrays = {name: mx.array(array) for name, array in inputs.items()}
        pixels = arrays.pop("pixel_values", None)
        found = self.model.get_input_embeddings(
            tokens, pixels, mask=mx.ones_like(tokens), **arrays
        ).to_dict()
        given = {k: v for k, v in found.items() if v is not None and k not in _NOT_FED}
        _require_in_place(given, len(token_ids))
        return given

    def _positions(self, found: mx.array | None) -> mx.array | None:
        if found is None or not self._has_rope_positions:
            return None
        return found if found.ndim == 3 else mx.broadcast_to(found[None], (3, *found.shape))

    def _forward(self, inputs: mx.array, cache: Caches, arguments: dict[str, Any]) -> mx.array:
        layers = cache
        if self._has_rope_positions:
            layers, counter = cache[:-1], cache[-1]
            positions = counter.take(inputs.shape[1])
            arguments.setdefault(
                "position_ids", mx.broadcast_to(positions[None], (3, *positions.shape))
            )
        output = self.language_model(inputs, cache=layers, **arguments)
        # Some models replace entries of the list that they are given.
        cache[: len(layers)] = layers
        logits: mx.array = output.logits
        return logits


def _require_in_place(given: Mapping[str, Any], count: int) -> None:
    if crossing := next((name for name in _CROSSINGS if name in given), None):
        raise NotEmbeddableError(crossing)
    if given["inputs_embeds"].shape[1] != count:
        raise NotEmbeddableError(f"{count} tokens, {given['inputs_embeds'].shape[1]} embeddings")
