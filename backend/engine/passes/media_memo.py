"""The recent outputs of a model's towers, within a budget of bytes."""

from collections import OrderedDict
from collections.abc import Sequence

from backend.core.prompt import MediaSpan
from backend.model.vision.vision_network import MediaFeatures, VisionNetwork

MAX_LENGTHS = 65_536


class MediaMemo:
    """Runs the towers, once for each medium while it is remembered.

    Belongs to the main thread.

    Attributes:
        runs: The number of tower runs.
        nbytes: The size of the remembered outputs.
    """

    def __init__(self, network: VisionNetwork, budget_bytes: int) -> None:
        """Start empty.

        Args:
            network: The network with the towers.
            budget_bytes: The maximum size of all features; the latest stay even above it.
        """
        self._network = network
        self._budget_bytes = budget_bytes
        self._features: OrderedDict[bytes, MediaFeatures] = OrderedDict()
        self._rope_lengths: OrderedDict[bytes, int | None] = OrderedDict()
        self.runs = 0
        self.nbytes = 0

    def features(self, span: MediaSpan, token_ids: Sequence[int]) -> MediaFeatures:
        """Return the language model's input for a medium.

        Args:
            span: Identifies the medium.
            token_ids: Its placeholder tokens.
        """
        known = self._features.get(span.digest)
        if known is not None:
            self._features.move_to_end(span.digest)
            return known
        made = self._network.embed_media(token_ids, span.inputs)
        self.runs += 1
        self._remember(span.digest, made)
        return made

    def rope_length(self, span: MediaSpan, token_ids: Sequence[int]) -> int:
        """Return the advance of the position by a medium.

        It is known without a tower run for a medium seen before.
        """
        if span.digest in self._rope_lengths:
            length = self._rope_lengths[span.digest]
        else:
            length = self.features(span, token_ids).rope_length
        return span.stop - span.start if length is None else length

    def may_split(self, features: MediaFeatures) -> bool:
        """Tell whether a medium's tokens may be fed in several passes."""
        return self._network.may_split_media(features)

    def _remember(self, digest: bytes, features: MediaFeatures) -> None:
        self._rope_lengths[digest] = features.rope_length
        if len(self._rope_lengths) > MAX_LENGTHS:
            self._rope_lengths.popitem(last=False)
        self._features[digest] = features
        self.nbytes += features.nbytes
        while self.nbytes > self._budget_bytes and len(self._features) > 1:
            self.nbytes -= self._features.popitem(last=False)[1].nbytes
