"""Bugs of mlx-vlm's processors, and processors without them."""

import pytest
from mlx_vlm.models.deepseekocr.processing_deepseekocr import DeepseekOCRProcessor
from mlx_vlm.models.deepseekocr_2.processing_deepseekocr import DeepseekOCR2Processor
from mlx_vlm.models.phi3_v.processing_phi3_v import Phi3VProcessor
from transformers import AutoTokenizer
from vision import picture

from backend.model.vision.towers import mend_processor

pytestmark = pytest.mark.mlx

TEXT = "What is it?"
RESOLUTION = {"candidate_resolutions": [(1024, 1024)], "patch_size": 16, "downsample_ratio": 4}


@pytest.fixture
def tokenizer(tiny_vision_models):
    return AutoTokenizer.from_pretrained(tiny_vision_models("llava"))


def last_tokens(processor, text, count):
    ids = processor(text=text, images=[picture(1)])["input_ids"]
    return ids.reshape(-1).tolist()[-count:]


def phi3_v(tokenizer):
    return Phi3VProcessor(tokenizer=tokenizer), "<|image_1|>"


def deepseekocr(tokenizer):
    return DeepseekOCRProcessor(tokenizer, **RESOLUTION), "<image>"


def deepseekocr_2(tokenizer):
    return DeepseekOCR2Processor(tokenizer, **RESOLUTION), "<image>"


@pytest.mark.parametrize("family", [phi3_v, deepseekocr, deepseekocr_2])
def test_no_token_of_the_text_is_lost(tokenizer, family):
    """Upstream contract: phi3_v drops the first one after a picture, the others the last one."""
    processor, placeholder = family(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    # The picture's own, of which there are hundreds, come before.
    before = last_tokens(processor, placeholder + TEXT, len(ids))
    mend_processor(processor)
    assert before != last_tokens(processor, placeholder + TEXT, len(ids)) == ids
