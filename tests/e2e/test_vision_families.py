"""Families whose pictures reach the text in a way of their own: equal to mlx-vlm, or refused."""

import json
from dataclasses import replace
from importlib.util import find_spec

import grpc
import mlx.core as mx
import numpy as np
import pytest
from groups import descendants
from serving import chat, code_of, served, stream, user
from transformers import AutoTokenizer
from vision import Reference, parts, picture, shown, token_ids, wav

from backend.config import ModelOptions
from backend.model.loader import load
from scripts.sweep.verdict import Outcome
from scripts.sweep.vision_check import check_vision, vision_reference
from scripts.sweep.vision_models import SWEPT_VISION_FAMILIES, build_vision_model
from scripts.tiny_models import CHAT_TEMPLATE
from scripts.tiny_vision import build_shape

pytestmark = pytest.mark.mlx

NO_TORCH = pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
# Leaves out the trials of batches, on which no refusal depends.
UNBATCHED = ["batching:false"]
COUNT = 8
SYSTEM = {"role": "system", "content": "You see. " + "be bi ba bo du " * 4}
QUESTIONS = {"What is it?": [picture(1)], "ba bi": [picture(2, (96, 48))], "Text, be bi bo.": []}


def ask(text, images):
    settings = {"Tokens": COUNT, "Logprobs": 1, "IgnoreEOS": True}
    return chat([SYSTEM, user(text)], **shown(*images), **settings)


async def replies(backend):
    return [
        token_ids(*(await stream(backend.stub, ask(text, images))).replies)
        for text, images in QUESTIONS.items()
    ]


@pytest.mark.parametrize(
    "family",
    [
        *("glm4v", "glm_ocr", "paddleocr_vl"),  # positions that stay inside the model
        *("gemma4_bidirectional", "gemma4_unified"),  # pictures that attend in both directions
        "minicpmv4_6",  # pixels in nested lists
        "qwen3_omni_moe",  # features of deeper layers for every token, in a part of the model
        "minicpmo",  # the language model of a family whose towers have other settings
        "minicpmv4_7",  # a text among the processor's arrays
        "kimi_vl",  # a list of shapes among them
        "dots_ocr",  # a processor that has the ids of its tokens in its code
        "deepseek_vl_v2",  # a processor that begins every prompt with BOS
        *("llava_next", "granite_vision"),  # more embeddings than placeholders
        "llava_bunny",  # a placeholder that is not a token
        "idefics2",  # a processor that writes a space after a picture
        "granite4_vision",  # features of deeper layers that upstream slices by the cache's length
    ],
)
# As an error it would be swallowed, and the processor of gemma4 not be found.
@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning")
@pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated:DeprecationWarning")
@pytest.mark.one_in(6)
async def test_tokens_are_those_of_mlx_vlm(tmp_path, family):
    directory = build_vision_model(family, tmp_path)
    reference = Reference(directory)
    async with served(directory) as backend:
        ours = await replies(backend)
    for tokens, (text, images) in zip(ours, QUESTIONS.items(), strict=True):
        theirs = reference.tokens(
            [SYSTEM, {"role": "user", "content": parts(text, *images)}], COUNT
        )
        assert len(theirs) > 1
        assert tokens[: len(theirs)] == theirs


@pytest.mark.parametrize("family", ["minimax_m3_vl", "cohere_compass"])
@pytest.mark.one_in(2)
async def test_rows_of_a_batch_are_told_positions_of_one_axis(tmp_path, family):
    """Upstream contract: minimax_m3_vl takes those of the batch before where it is told none."""
    directory = build_vision_model(family, tmp_path)
    expected = vision_reference(directory)
    async with served(directory) as backend:
        found = await check_vision(backend.stub, expected)
    assert [verdict.outcome for verdict in found] == [Outcome.EQUAL] * 2, found


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon_ocr", "positions of two axes for every token"),
        ("got", "the arrays of mlx-vlm's processor do not fit its towers"),
        ("hunyuan_vl", "would not be those of mlx-vlm"),  # keeps positions of the latest prompt
        ("ernie4_5_moe_vl", "its processor cannot be loaded: it needs tokenizer.model"),
        pytest.param("phi4_siglip", "it needs the packages torch and torchvision", marks=NO_TORCH),
        ("youtu_vl", "no processor for this family"),
        ("molmo", "mlx-vlm puts it before the whole prompt"),
        ("moondream3", "mlx-vlm puts it before the whole prompt"),
    ],
)
@pytest.mark.one_in(3)
async def test_pictures_that_would_be_misread_are_refused_and_text_is_served(
    tmp_path, family, reason
):
    directory = build_vision_model(family, tmp_path)
    reference = Reference(directory)
    async with served(directory, Options=UNBATCHED) as backend:
        code, details = await code_of(stream(backend.stub, ask("What is it?", [picture(1)])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Images[0]: image input of this model is not served" in details
        assert reason in details
        reply = await stream(backend.stub, ask("Text, be bi bo.", []))
    theirs = reference.tokens([SYSTEM, user("Text, be bi bo.")], COUNT)
    assert len(theirs) > 1
    assert token_ids(*reply.replies)[: len(theirs)] == theirs


@pytest.mark.parametrize("family", ["kimi_vl", "youtu_vl"])
async def test_an_engine_keeps_no_process_that_rendered_for_its_trials(tmp_path, family):
    async with served(build_vision_model(family, tmp_path)) as backend:
        # A forked engine has a copy of the process from which it was forked.
        assert len(list(descendants(backend.engine.process_id))) <= 1


@NO_TORCH
def test_a_processor_that_loads_itself_is_given_up_at_once(tmp_path, monkeypatch):
    """Upstream contract: phi4_siglip asks AutoProcessor for itself until the stack is full."""
    directory = build_vision_model("phi4_siglip", tmp_path)
    tokenizers, read = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizers.append(a) or read(*a, **k)
    )
    refused = load(ModelOptions(model=str(directory)), directory).card.refused_media
    assert "it needs the packages torch" in str(refused)
    assert len(tokenizers) < 10


PROCESSOR = """\
import numpy as np
from transformers import AutoTokenizer, ProcessorMixin


class OwnProcessor(ProcessorMixin):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, directory, **_):
        return cls(AutoTokenizer.from_pretrained(directory))

    def __call__(self, text, images=None, **_):
        sides = [np.asarray(image.resize((28, 28)), np.float32) / 255 for image in images]
        text = text.replace("<IMG_CONTEXT>", "<IMG_CONTEXT>" * 4)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [ids], "pixel_values": np.stack(sides).transpose(0, 3, 1, 2)}
"""


async def test_a_trusted_processor_of_the_checkpoint_serves_where_mlx_vlm_has_none(tmp_path):
    directory = build_vision_model("llmjpvl", tmp_path)
    named = {"processor_class": "OwnProcessor", "auto_map": {"AutoProcessor": "own.OwnProcessor"}}
    (directory / "processor_config.json").write_text(json.dumps(named), encoding="utf-8")
    (directory / "own.py").write_text(PROCESSOR, encoding="utf-8")
    async with served(directory, TrustRemoteCode=True) as backend:
        seen = [
            token_ids(*(await stream(backend.stub, ask("What is it?", images))).replies)
            for images in ([picture(1)], [picture(2)], [])
        ]
    assert len({tuple(tokens) for tokens in seen}) == len(seen)


async def test_a_template_that_takes_only_text_gets_the_placeholder_of_mlx_vlm(tmp_path):
    directory = build_vision_model("llava_bunny", tmp_path)
    theirs = Reference(directory).tokens(
        [SYSTEM, {"role": "user", "content": parts("What is it?", picture(1))}], COUNT
    )
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    async with served(directory) as backend:
        reply = await stream(backend.stub, ask("What is it?", [picture(1)]))
    assert len(theirs) > 1
    assert token_ids(*reply.replies)[: len(theirs)] == theirs


async def test_a_refusal_says_what_is_missing_and_not_that_it_is_a_nonetype(tmp_path):
    shape = replace(SWEPT_VISION_FAMILIES["deepseek_vl_v2"], bos_token=None)
    reason = "needs a token that tokenizer_config.json does not name: there is no bos_token"
    async with served(build_shape(shape, tmp_path), Options=UNBATCHED) as backend:
        code, details = await code_of(stream(backend.stub, ask("What is it?", [picture(1)])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Images[0]: image input of this model is not served" in details
    assert reason in details
    assert "NoneType" not in details


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("paligemma", "would not be those of mlx-vlm"),
        ("florence2", "a separate encoder"),
    ],
)
async def test_a_model_whose_text_would_be_misread_is_refused_by_name(tmp_path, family, reason):
    directory = build_vision_model(family, tmp_path)
    async with served() as backend:
        code, details = await code_of(backend.load(directory))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert family in details
    assert reason in details
    assert "vision:false" not in details


async def test_sounds_that_change_the_weights_of_text_are_refused(tmp_path):
    """Upstream contract: phi4mm goes on with the weights of the latest medium."""
    # No sound gets as far as its tokens, which upstream has at the end of a large vocabulary.
    swept = SWEPT_VISION_FAMILIES["phi4mm"]
    shape = replace(swept, fixed_ids={}, further_tokens=tuple(swept.fixed_ids))
    directory = build_shape(shape, tmp_path)
    add_speech_adapter(directory / "model.safetensors")
    async with served(directory, Options=UNBATCHED) as backend:
        sounds = {"Audios": [wav(np.sin(np.arange(16_000) / 10))]}
        code, details = await code_of(stream(backend.stub, chat([user("What is it?")], **sounds)))
        text = await stream(backend.stub, ask("Text, be bi bo.", []))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "reads the text around them with other weights" in details
    assert token_ids(*text.replies)


def add_speech_adapter(path):
    weights = mx.load(str(path))
    name = next(name for name in weights if name.endswith("layers.0.self_attn.o_proj.weight"))
    layer = name.removesuffix(".weight")
    base = weights.pop(name)
    weights[f"{layer}.base_layer.weight"] = base
    weights[f"{layer}.lora_A.speech.weight"] = mx.ones((2, base.shape[1]))
    weights[f"{layer}.lora_B.speech.weight"] = mx.ones((base.shape[0], 2))
    mx.save_safetensors(str(path), weights)


@pytest.mark.parametrize("family", ["llama4", "minicpmv4_6", "llava_next"])
async def test_a_second_picture_that_mlx_vlm_reads_in_another_way_is_refused(tmp_path, family):
    """Upstream contract: minicpmv4_6 numbers pictures, llava_next drops the text between them."""
    directory = build_vision_model(family, tmp_path)
    two = [picture(1), picture(2)]
    async with served(directory, Options=UNBATCHED) as backend:
        assert (await stream(backend.stub, ask("What is it?", two[:1]))).message
        code, details = await code_of(stream(backend.stub, ask("What is it?", two)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Images[1]: this model takes one image per prompt" in details
