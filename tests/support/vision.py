"""Pictures for requests, and mlx-vlm's own replies to them, for tests of models that see."""

import base64
import io
import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from backend.model.checkpoint.mends import mend
from backend.model.vision.towers import mend_processor
from backend.pb import backend_pb2 as pb


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Return a picture of coloured noise; every seed gives another one."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_base64(image: Image.Image) -> str:
    """Return a picture as hosts send it."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def shown(*images: Image.Image) -> dict[str, Any]:
    """Return the fields of a request that shows pictures."""
    return {"Images": [as_base64(image) for image in images]}


def gif(frames: Sequence[Image.Image]) -> str:
    """Return pictures as an animation, base64."""
    buffer = io.BytesIO()
    first, *rest = frames
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=500)
    return base64.b64encode(buffer.getvalue()).decode()


def wav(samples: np.ndarray, sampling_rate: int = 16_000) -> str:
    """Return samples between -1 and 1 as a sound of 16 bits, base64."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        file.writeframes(np.round(samples * 32_768).astype("<i2").tobytes())
    return base64.b64encode(buffer.getvalue()).decode()


def parts(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    """Return the content of a message for mlx-vlm: pictures, then text."""
    seen = [{"type": "image", "image": image} for image in images]
    return [*seen, {"type": "text", "text": text}]


def token_ids(*replies: pb.Reply) -> list[int]:
    """Return the ids in the log-probabilities of a reply."""
    last = [reply for reply in replies if reply.logprobs][-1]
    return [entry["id"] for entry in json.loads(last.logprobs)["content"]]


class Reference:
    """A model of mlx-vlm by itself: cold, one request at a time."""

    def __init__(self, directory: Path) -> None:
        import mlx_vlm

        self._model, self._processor = mlx_vlm.load(str(directory))
        mend_processor(self._processor)
        mend(self._model)

    def tokens(self, messages: Sequence[dict[str, Any]], count: int, **inputs: Any) -> list[int]:
        """Return the greedy tokens of a reply, without the one that ends it."""
        import mlx_vlm

        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        images = [
            part["image"]
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
            if part["type"] == "image"
        ]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        steps = mlx_vlm.stream_generate(
            self._model,
            self._processor,
            prompt,
            image=images or None,
            max_tokens=count,
            temperature=0.0,
            **inputs,
        )
        # The last one repeats a token with the rest of the text.
        return [step.token for step in steps if step.finish_reason is None]
