import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from backend.config import ModelOptions, TuningOptions
from backend.model.text.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture
def llama_copy(tiny_models: Callable[[str], Path], tmp_path: Path) -> Path:
    """A llama that a test may spoil."""
    copy = tmp_path / "llama"
    copy.mkdir()
    for file in tiny_models("llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture(scope="session")
def chat_template() -> Callable[[str], ChatTemplate]:
    """Templates in the style of several model families, by file name."""
    from jinja_here import jinja_here
    from transformers import PreTrainedTokenizerFast

    @functools.cache
    def loaded(name: str) -> ChatTemplate:
        text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=FastTokenizer(models.BPE()),
            bos_token="<s>",  # noqa: S106 (no password)
            eos_token="</s>",  # noqa: S106 (no password)
            chat_template=text,
        )
        return jinja_here(tokenizer)

    return loaded


@pytest.fixture
def options() -> Callable[..., ModelOptions]:
    def made(tuning: dict[str, object] | None = None, **fields: object) -> ModelOptions:
        named = {"model": "tiny", **fields}
        return ModelOptions(**named, tuning=TuningOptions.of(**(tuning or {})))

    return made
