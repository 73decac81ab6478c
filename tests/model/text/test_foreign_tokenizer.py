"""Families whose tokenizer mlx-vlm takes from elsewhere."""

import json
import shutil

import pytest

from backend.errors import UnsupportedModelError
from backend.model.loader import load
from scripts.sweep.vision_models import build_vision_model

pytestmark = pytest.mark.mlx

SOURCE = "mlx_vlm.models.moondream2.processing_moondream2.TOKENIZER_REPO"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_vision_model("moondream2", tmp_path_factory.mktemp("moondream2"))


def another_tokenizer(checkpoint, directory):
    """Write a tokenizer in which two words have changed places."""
    shutil.copytree(checkpoint, directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    words["a"], words["e"] = words["e"], words["a"]
    path.write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_a_checkpoint_with_the_tokenizer_of_its_model_is_loaded(checkpoint, options, monkeypatch):
    monkeypatch.setattr(SOURCE, str(checkpoint))
    assert load(options(), checkpoint).card.model_type == "moondream2"


@pytest.mark.parametrize("settings", [{}, {"vision": False}], ids=["all", "text"])
def test_one_with_another_is_refused(checkpoint, options, monkeypatch, tmp_path, settings):
    monkeypatch.setattr(SOURCE, str(another_tokenizer(checkpoint, tmp_path / "other")))
    with pytest.raises(UnsupportedModelError, match=r"put the tokenizer files of moondream/"):
        load(options(settings), checkpoint)


def test_one_that_cannot_be_compared_is_refused(checkpoint, options, monkeypatch, tmp_path):
    monkeypatch.setattr(SOURCE, str(tmp_path / "nowhere"))
    with pytest.raises(UnsupportedModelError, match=r"cannot be had.*allow the download"):
        load(options(), checkpoint)
