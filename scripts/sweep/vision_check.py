"""Images of a family through the server: one, another, two, a second turn, none; and in a batch."""

import asyncio
import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
from grpc.aio import AioRpcError
from PIL import Image

from backend.model.checkpoint.mends import mend
from backend.model.vision.media_processor import HfProcessor
from backend.model.vision.towers import mend_processor
from backend.pb import backend_pb2 as pb
from backend.pb import backend_pb2_grpc
from scripts.sweep.verdict import Expected, Outcome, Verdict, worst

TOKENS = 12
TEXT = "text"

_SYSTEM = {"role": "system", "content": "You see. " + "be bi ba bo du " * 4}
_SIZES = {1: (64, 64), 2: (96, 48)}
_NEEDED = "one"
_ONE_ONLY = "this model takes one"
_REFUSALS = ("is not served", "this model takes one", "reads text only")


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation whose first question has images, given by their seeds."""

    turns: Sequence[str]
    pictures: Sequence[int] = ()

    def messages(self) -> list[dict[str, str]]:
        """Return the messages without their images."""
        roles = ("user", "assistant")
        turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(self.turns)]
        return [_SYSTEM, *turns]

    def messages_with_parts(self) -> list[dict[str, Any]]:
        """Return the messages in the format of vision models' chat templates."""
        system, first, *others = self.messages()
        if not self.pictures:
            return [system, first, *others]
        parts = [{"type": "image"} for _ in self.pictures]
        shown = {"role": "user", "content": [*parts, {"type": "text", "text": first["content"]}]}
        return [system, shown, *others]


CASES: Mapping[str, Case] = {
    "one": Case(["What is it?"], [1]),
    "another": Case(["ba bi"], [2]),
    "two": Case(["Both? bo bu"], [1, 2]),
    "second turn": Case(["What is it?", "A dog.", "Sure? Look again."], [1]),
    TEXT: Case(["Tell me a thing, be bi ba bo."]),
}


def vision_reference(directory: Path, *, briefly: bool = False) -> dict[str, Expected]:
    """Return mlx-vlm's own replies, without the cases that it cannot run.

    Args:
        directory: A checkpoint.
        briefly: Whether to try only a text and one image.

    Raises:
        Exception: It cannot even run text; the error is its own.
    """
    import mlx_vlm

    network, processor = mlx_vlm.load(str(directory))
    mend_processor(processor)
    mend(network)
    replies = {}
    # Text first: some models read it differently after an image.
    for name in (TEXT, _NEEDED) if briefly else sorted(CASES, key=lambda name: name != TEXT):
        try:
            replies[name] = _generated(network, processor, CASES[name])
        # Upstream's processors raise anything.
        except Exception:
            if name == TEXT:
                raise
    return replies


def _generated(network: object, processor: HfProcessor, case: Case) -> Expected:
    import mlx_vlm

    tokenizer = getattr(processor, "tokenizer", processor)
    prompt = tokenizer.apply_chat_template(
        case.messages_with_parts(), tokenize=False, add_generation_prompt=True
    )
    # The server is asked to continue in the same way.
    tokenizer.stopping_criteria = lambda _token: False
    images = [_picture(seed) for seed in case.pictures] or None
    tokens, gaps = [], []
    steps = mlx_vlm.stream_generate(
        network, processor, prompt, image=images, max_tokens=TOKENS, temperature=0.0
    )
    for step in steps:
        # The last one repeats a token with the remaining text.
        if step.finish_reason is not None:
            break
        second, first = mx.sort(step.logprobs.reshape(-1).astype(mx.float32))[-2:].tolist()
        tokens.append(int(step.token))
        gaps.append(first - second)
    return Expected(tokens, gaps)


async def check_vision(
    stub: backend_pb2_grpc.BackendStub, expected: Mapping[str, Expected]
) -> tuple[Verdict, Verdict]:
    """Compare the loaded model's replies to text and images with those of mlx-vlm."""
    alone = {name: await _judged(stub, name, "alone", expected) for name in CASES}
    warm = {name: await _judged(stub, name, "warm", expected) for name in ("one", TEXT)}
    batched = await asyncio.gather(*(_judged(stub, name, "batched", expected) for name in CASES))
    rounds = [alone, warm, dict(zip(CASES, batched, strict=True))]
    seen = [verdicts.pop(name) for verdicts in rounds for name in list(verdicts) if name != TEXT]
    text = worst(verdicts[TEXT] for verdicts in rounds)
    return text, _pictures(seen)


def _pictures(seen: Sequence[Verdict]) -> Verdict:
    """Return the verdict on all images; a model may support only one per prompt."""
    verdict = worst(seen)
    if verdict.outcome is Outcome.REFUSED and verdict.detail.startswith(_ONE_ONLY):
        rest = worst(each for each in seen if each.outcome is not Outcome.REFUSED)
        return Verdict(rest.outcome, "; ".join(filter(None, ["one in a prompt", rest.detail])))
    return verdict


async def _judged(
    stub: backend_pb2_grpc.BackendStub, name: str, how: str, expected: Mapping[str, Expected]
) -> Verdict:
    case = f"{name}, {how}"
    if name not in expected and name != _NEEDED:
        return Verdict(Outcome.EQUAL)
    try:
        tokens = await _reply(stub, CASES[name])
    except AioRpcError as error:
        details = error.details() or ""
        is_told = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        if is_told and any(words in details for words in _REFUSALS):
            return Verdict(Outcome.REFUSED, details.partition(": ")[2])
        return Verdict(Outcome.WRONG, f"{case}: {error.code().name}: {details}")
    if name not in expected:
        return Verdict(Outcome.WRONG, f"{case}: a reply, and none of mlx-vlm by itself")
    return expected[name].compared(case, tokens)


async def _reply(stub: backend_pb2_grpc.BackendStub, case: Case) -> list[int]:
    request = pb.PredictOptions(
        UseTokenizerTemplate=True,
        Messages=[pb.Message(**message) for message in case.messages()],
        Images=[_as_base64(_picture(seed)) for seed in case.pictures],
        Tokens=TOKENS,
        IgnoreEOS=True,
        Logprobs=1,
    )
    tokens: list[int] = []
    async for part in stub.PredictStream(request):
        if part.logprobs:
            tokens = [entry["id"] for entry in json.loads(part.logprobs)["content"]]
    return tokens


def _picture(seed: int) -> Image.Image:
    width, height = _SIZES[seed]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _as_base64(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
