"""Heads that predict the token after the next (MTP), part of the checkpoints of some families."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.errors import UnsupportedModelError
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import cast
from backend.model.device import DEVICE
from backend.model.heads.network import HeadNetwork, Target


class MtpNetwork(HeadNetwork):
    """Reads the last states of the model; uses its output projection or its own."""

    def __init__(self, head: Network, network: Network, **attention: Any) -> None:  # noqa: ANN401
        """Create a drafter for a network.

        Args:
            head: Upstream's module.
            network: The model.
            attention: `masks_are_arrays` and `layer_cache` of a `HeadNetwork`.

        Raises:
            UnsupportedModelError: The head was trained with another model.
        """
        target = Target(network)
        own = head.norm.weight.shape[0]
        if target.width != own:
            raise UnsupportedModelError(
                f"the MTP head is for states of {own} numbers, and the model has {target.width}"
            )
        super().__init__(head, target, [target.norm], **attention)
        self._project = head.get("lm_head") or target.project
        _require_vocab(head, target.vocab_size)

    def _read(
        self, embedded: mx.array, before: mx.array, mask: object, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        head = self._head
        pairs = [head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(before)]
        states = head.fc(mx.concatenate(pairs, axis=-1))
        for layer, layer_cache in zip(head.layers, cache, strict=True):
            states = layer(states, mask=mask, cache=layer_cache)
        after = head.norm(states)
        return after, self._project(after)


def _require_vocab(head: Network, vocab_size: int) -> None:
    """Check the embeddings and the output of a head that has its own."""
    for name in ("embed_tokens", "lm_head"):
        if name in head and (own := head[name].weight.shape[0]) != vocab_size:
            raise UnsupportedModelError(
                f"the MTP head is for a vocabulary of {own} tokens, and the model has {vocab_size}"
            )


def build_mtp(directory: Path, network: Network, dtype: str | None) -> MtpNetwork:
    """Return the MTP head of a directory, alone or with its model; weights stay on disk.

    Raises:
        UnsupportedModelError: It is for another model; other failures are those of upstream.
    """
    from mlx_vlm.speculative.drafters import load_drafter

    head, _ = load_drafter(str(directory), "mtp", lazy=True)
    if dtype is not None:
        cast(head, dtype)
    DEVICE.widen_experts(head)
    return MtpNetwork(head, network)
