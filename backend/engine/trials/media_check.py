"""Checks at load whether a model reads media here as it does in mlx-vlm alone.

Towers pass their states to the text in many ways. One unknown to this engine would give wrong
answers without any error.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.core.prompt import MediaKind, Prompt
from backend.core.request import GenerationParams, GenerationRequest
from backend.engine.findings import MediaFindings, Page
from backend.engine.passes.feeder import MediaFeeder
from backend.engine.plan import FreshCaches
from backend.engine.rows.row import Row
from backend.model.checkpoint.failures import one_line
from backend.model.device import DEVICE
from backend.model.vision.media_processor import PROCESSOR_FAILURES, ProcessorError
from backend.model.vision.media_support import Examiner, OtherTokensError
from backend.model.vision.vision_network import VisionNetwork

_STEPS = 3
# The largest probability of the next token that may move to other tokens.
_TOLERANCE = {mx.float32: 2e-3, mx.float16: 0.03, mx.bfloat16: 0.1}

log = logging.getLogger(__name__)


def media_faults(
    network: VisionNetwork, fresh_caches: FreshCaches, examiner: Examiner, page: Page
) -> MediaFindings:
    """Return the kinds of media to refuse, and those limited to one per prompt, with reasons."""
    reading, refused = _Reading(network, fresh_caches), dict[MediaKind, str]()
    single: dict[MediaKind, str] = {}
    for kind in examiner.processor.snippets:
        for count in range(1, examiner.most(kind) + 1):
            if fault := _media_fault(reading, examiner, kind, count):
                problem = "%d of the kind %s in a prompt: %s"
                page.say(logging.WARNING, problem, count, kind.value, fault)
                (refused if count == 1 else single)[kind] = fault
                break
    return MediaFindings(refused, single)


def text_fault(
    network: VisionNetwork, fresh_caches: FreshCaches, token_ids: Sequence[int]
) -> str | None:
    """Return why a model does not even read text correctly, or `None` if it does."""
    reading, prompt = _Reading(network, fresh_caches), Prompt(tuple(token_ids))
    try:
        fault = reading.difference(prompt, {})
        if fault and reading.difference(prompt, {}, pieces=1) is None:
            return f"{fault} to a prompt that is fed in pieces"
        return fault
    except PROCESSOR_FAILURES:
        log.info("mlx-vlm by itself does not generate text with this model", exc_info=True)
        return None


def _media_fault(
    reading: "_Reading", examiner: Examiner, kind: MediaKind, count: int
) -> str | None:
    try:
        trial = examiner.trial(kind, count)
        return reading.difference(trial.prompt, trial.whole_inputs)
    except PROCESSOR_FAILURES as error:
        level = logging.WARNING if count == 1 else logging.INFO
        log.log(level, "the model raises %s: %s", type(error).__name__, one_line(error))
        fault = "this version of mlx-vlm fails on it"
    except OtherTokensError as error:
        return f"the model's processor: {error}"
    except ProcessorError as error:
        fault = f"the model's processor: {error}"
    if count == 1:
        return fault
    # Media that the libraries cannot take together are fed one after another by this engine.
    log.info("mlx-vlm by itself cannot show %d of the kind %s: %s", count, kind.value, fault)
    return None


class _Reading(NamedTuple):
    """How a model reads media here, and in mlx-vlm."""

    network: VisionNetwork
    fresh_caches: FreshCaches

    def difference(
        self, prompt: Prompt, inputs: Mapping[str, Any], *, pieces: int = 2
    ) -> str | None:
        """Compare the first tokens of a reply; errors of the model and mlx-vlm pass through."""
        tokens, expected = self.network.reply_of_upstream(prompt.token_ids, inputs, _STEPS)
        served = self._served(prompt, tokens[:-1], pieces)
        moved = mx.abs(mx.softmax(served, axis=-1) - mx.exp(expected.astype(mx.float32)))
        gap = mx.max(mx.sum(moved, axis=-1)).item() / 2
        if gap <= _TOLERANCE[DEVICE.precision(_precision(self.network))]:
            return None
        return f"its answers would not be those of mlx-vlm (probabilities differ by {gap:.2g})"

    def _served(self, prompt: Prompt, reply: Sequence[int], pieces: int) -> mx.array:
        """Return logits [S, V] after a prompt that is fed in pieces, and after each of a reply."""
        params = GenerationParams(request_id="trial")
        row = Row(GenerationRequest(params=params, prompt=prompt, room=1))
        feeder = MediaFeeder(self.network, self.fresh_caches)
        # Media are split if they may be.
        longest = max((span.stop - span.start for span in prompt.media), default=row.prefill_left)
        piece = longest // pieces + 1
        while left := row.prefill_left:
            feeder.feed(row, min(left, piece))
        caches = row.own_caches(self.fresh_caches)
        ids = (prompt.token_ids[-1], *reply)
        logits = [self.network(mx.array([[token]]), cache=caches)[0, -1] for token in ids]
        return mx.stack(logits).astype(mx.float32)


def _precision(network: VisionNetwork) -> mx.Dtype:
    """Return the least precise type of the weights."""
    kinds = {weight.dtype for _, weight in tree_flatten(network.parameters())}
    return next((kind for kind in (mx.bfloat16, mx.float16) if kind in kinds), mx.float32)
