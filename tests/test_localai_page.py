"""What `docs/start/localai.md` tells users to write is what the backend reads."""

import json
import re
from pathlib import Path

import pytest
import yaml

from backend.config import TuningOptions
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.rpc.parsing.tuning_options import tuning_options

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "start" / "localai.md").read_text(encoding="utf-8")
MODELS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
NAMES = [model["name"] for model in MODELS]


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_options_of_the_yaml_are_known_and_of_their_types(model):
    names = [option.partition(":")[0] for option in model["options"]]
    assert set(names) <= TuningOptions().by_name().keys()
    assert len(set(names)) == len(names)
    tuning_options(model["options"], "")


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_models_are_such_as_the_host_takes(model):
    assert re.fullmatch(r"[a-zA-Z0-9-_]+", model["backend"])
    assert not model["parameters"]["model"].startswith("/")
    assert ".." not in model["parameters"]["model"]


def test_parsers_of_the_yaml_are_formats_that_there_are():
    options = tuning_options(MODELS[0]["options"], "")
    assert any(row.is_called(options.text.tool_parser) for row in TOOL_FORMATS)
    assert any(row.is_called(options.text.reasoning_parser) for row in REASONING_FORMATS)


def test_chat_models_get_their_template():
    assert MODELS[0]["template"] == {"use_tokenizer_template": True}


def test_external_backends_are_names_and_places():
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert set(json.loads(block)) == {"mlx", "mlx-vlm"}


def test_targets_that_the_page_names_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([\w-]+)", PAGE, re.MULTILINE))
    assert targets >= {"package", "image", "test-extra-backend"}
    assert targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
