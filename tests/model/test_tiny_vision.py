from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
import pytest
from click.testing import CliRunner
from mlx_vlm.utils import prepare_inputs
from PIL import Image

from scripts.tiny_vision import VISION_FAMILIES, build, main

pytestmark = [
    pytest.mark.mlx,
    # As an error it would be swallowed, and the processor of gemma4 not be found.
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]

RED = Image.new("RGB", (48, 48), "red")
BLUE = Image.new("RGB", (48, 48), "blue")
WIDE = Image.new("RGB", (100, 50), "red")
SECOND = 16_000  # samples

# By family: tokens of a square and of a wide picture.
IMAGE_TOKENS = {
    "qwen3_vl": (9, 10),
    "qwen2_5_vl": (9, 10),
    "qwen3_5": (9, 10),
    "smolvlm": (20, 12),
    "gemma3": (4, 4),
    "gemma4": (64, 55),
    "llava": (16, 16),
    "mllama": (1, 1),
}


class ImagesOnly:
    """An image processor without the keywords that llava's processor should not hand it."""

    def __init__(self, image_processor: Any):
        self._image_processor = image_processor

    def __call__(self, images, **_):
        return self._image_processor(images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)


@dataclass(frozen=True)
class Loaded:
    network: Any
    processor: Any
    placeholders: dict[str, str]

    def prompt(self, *parts: str) -> str:
        content = [*({"type": part} for part in parts), {"type": "text", "text": "what is it?"}]
        return self.processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def prepare(self, *parts: str, **media: Any) -> dict[str, Any]:
        return prepare_inputs(self.processor, prompts=self.prompt(*parts), **media)

    def count(self, token_field: str, inputs: dict[str, Any]) -> int:
        token_id = getattr(self.network.config, token_field)
        return int((inputs["input_ids"] == token_id).sum())

    def answer(self, *parts: str, **media: Any) -> list[int]:
        steps = mlx_vlm.stream_generate(
            self.network, self.processor, self.prompt(*parts), max_tokens=6, **media
        )
        return [step.token for step in steps]


@pytest.fixture(scope="module")
def loaded(tiny_vision_models: Callable[[str], Path]) -> Callable[[str], Loaded]:
    models: dict[str, Loaded] = {}

    def load(family: str) -> Loaded:
        if family not in models:
            network, processor = mlx_vlm.load(str(tiny_vision_models(family)))
            if family == "llava":
                processor.image_processor = ImagesOnly(processor.image_processor)
            placeholders = dict(VISION_FAMILIES[family].placeholders)
            models[family] = Loaded(network, processor, placeholders)
        return models[family]

    return load


def image_token_field(family: str) -> str:
    return next(name for name in VISION_FAMILIES[family].token_ids if name.startswith("image_tok"))


@pytest.mark.parametrize(("family", "counts"), IMAGE_TOKENS.items())
def test_a_picture_becomes_tokens_and_pixels(family: str, counts: tuple[int, int], loaded):
    model = loaded(family)
    for picture, count in zip((RED, WIDE), counts, strict=True):
        inputs = model.prepare("image", images=[picture])
        assert model.count(image_token_field(family), inputs) == count
        assert inputs["pixel_values"].size > 0


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_answer_depends_on_the_picture_and_is_repeatable(family: str, loaded):
    model = loaded(family)
    answers = [model.answer("image", image=[picture]) for picture in (RED, BLUE, RED)]
    text_only = model.answer()
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]
    assert text_only not in answers
    assert len({*answers[0], *answers[1], *text_only}) > 4


def test_gemma4_hears(loaded):
    model = loaded("gemma4")
    assert model.processor.feature_extractor.sampling_rate == SECOND
    times = np.arange(SECOND, dtype=np.float32) / SECOND
    low, high = (np.sin(2 * np.pi * pitch * times) for pitch in (220, 880))
    inputs = model.prepare("audio", audio=[low])
    assert model.count("audio_token_id", inputs) == 25
    answers = [model.answer("audio", audio=[sound]) for sound in (low, high, low)]
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]


def test_gemma4_sees_and_hears_in_one_prompt(loaded):
    model = loaded("gemma4")
    silence = np.zeros(SECOND // 2, dtype=np.float32)
    inputs = model.prepare("image", "audio", images=[RED], audio=[silence])
    assert model.count("image_token_id", inputs) == 64
    assert model.count("audio_token_id", inputs) == 13


def test_mllama_hands_its_picture_to_cross_attention(loaded):
    model = loaded("mllama")
    inputs = model.prepare("image", images=[RED])
    features = model.network.get_input_embeddings(**inputs)
    assert features.cross_attention_states is not None


def test_the_processor_of_llava_forwards_keywords_that_its_image_processor_refuses(
    tiny_vision_models: Callable[[str], Path],
):
    _, processor = mlx_vlm.load(str(tiny_vision_models("llava")))
    with pytest.raises(ValueError, match="padding"):
        prepare_inputs(processor, images=[RED], prompts="<image>")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_template_writes_every_part_of_a_message(family: str, loaded):
    model = loaded(family)
    render = model.processor.tokenizer.apply_chat_template
    parts = [{"type": kind} for kind in model.placeholders] + [{"type": "text", "text": "hello"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"function": {"name": "look", "arguments": {"at": "it"}}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    whole = "".join(model.placeholders.values()) + "hello"
    text = render(messages, tools=tools, tokenize=False)
    assert f"<|im_start|>user\n{whole}<|im_end|>" in text
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>' in text
    messages[1]["content"] = whole
    assert render(messages, tools=tools, tokenize=False) == text


def test_the_template_refuses_a_part_that_the_family_does_not_take(loaded):
    with pytest.raises(Exception, match="unknown part: audio"):
        loaded("qwen3_vl").prompt("audio")


def test_the_same_seed_gives_the_same_weights(tmp_path: Path):
    def weights(name: str, seed: int) -> dict[str, mx.array]:
        return mx.load(str(build("smolvlm", tmp_path / name, seed=seed) / "model.safetensors"))

    one, two, other = weights("one", 1), weights("two", 1), weights("other", 2)
    assert all(mx.array_equal(one[name], two[name]) for name in one)
    head = "language_model.lm_head.weight"
    assert not mx.array_equal(one[head], other[head])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_model_is_small(family: str, tiny_vision_models: Callable[[str], Path]):
    files = tiny_vision_models(family).iterdir()
    assert sum(file.stat().st_size for file in files) < 2_000_000


def test_the_command_line_writes_a_model(tmp_path: Path):
    result = CliRunner().invoke(main, ["qwen3_vl", str(tmp_path / "made")])
    assert result.exit_code == 0
    assert (tmp_path / "made" / "preprocessor_config.json").exists()
