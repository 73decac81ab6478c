"""The tokenizer and the chat template of a checkpoint, through transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from backend.config import ModelOptions
from backend.errors import LoadError
from backend.model.checkpoint import read_json
from backend.model.failures import one_line
from backend.model.hf_renderer import make_jinja_renderer, make_renderer, template_text
from backend.model.paths import find_path
from backend.model.template import ChatTemplate
from backend.model.tokenizer import Tokenizer
from backend.model.upstream import HfTokenizer


def load_tokenizer(
    options: ModelOptions, directory: Path, defaults: Mapping[str, Any]
) -> tuple[Tokenizer, ChatTemplate, frozenset[int]]:
    """Return the tokenizer, the chat template, and the ids that end a reply by their account.

    Args:
        options: May name another tokenizer, special tokens and a template.
        directory: The model's.
        defaults: `TOKENIZER_DEFAULTS` of the model's module in mlx-lm.

    Raises:
        LoadError: There is no tokenizer, or an option does not fit it.
    """
    hf_tokenizer = _read(options, _tokenizer_directory(options, directory))
    tuning = options.tuning
    eos_ids = {hf_tokenizer.eos_token_id, *defaults.get("eos_token_ids", ())}
    eos_ids.add(_set_special(hf_tokenizer, "eos_token", tuning.eos_token))
    _set_special(hf_tokenizer, "pad_token", tuning.pad_token)
    bos_id = _set_special(hf_tokenizer, "bos_token", tuning.bos_token)
    template = _chat_template(options, hf_tokenizer, defaults)
    return Tokenizer(hf_tokenizer, bos_id=bos_id), template, frozenset(eos_ids - {None})


def _tokenizer_directory(options: ModelOptions, directory: Path) -> Path:
    if not options.tokenizer:
        return directory
    path = find_path(options.tokenizer, options.models_dir)
    if path is None:
        raise LoadError(f"the tokenizer {options.tokenizer} does not exist")
    return path if path.is_dir() else path.parent


def _read(options: ModelOptions, directory: Path) -> HfTokenizer:
    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=options.trusts_remote_code
        )
    except (KeyError, OSError, TypeError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise
        reason = one_line(error)
        raise LoadError(f"{directory} has no tokenizer that can be read: {reason}") from error
    _require_words(hf_tokenizer, directory)
    # Checkpoints with towers keep their template beside the processor.
    beside = directory / "chat_template.json"
    if not hf_tokenizer.chat_template and beside.is_file():
        hf_tokenizer.chat_template = read_json(beside, dict).get("chat_template")
    return hf_tokenizer


def _require_words(hf_tokenizer: HfTokenizer, directory: Path) -> None:
    """Refuse what transformers makes up for some model types where there are no files."""
    added = {token.content for token in hf_tokenizer.added_tokens_decoder.values()}
    if hf_tokenizer.get_vocab().keys() <= added:
        raise LoadError(f"{directory} has no tokenizer: nothing there holds a vocabulary")


def _set_special(hf_tokenizer: HfTokenizer, role: str, text: str | None) -> int | None:
    """Make a token of the vocabulary the special one of a role, and return its id."""
    if text is None:
        return None
    token_id: int | None = hf_tokenizer.get_vocab().get(text)
    if token_id is None:
        raise LoadError(f"{role}: {text!r} is not a token of this model")
    setattr(hf_tokenizer, role, text)
    return token_id


def _chat_template(
    options: ModelOptions, hf_tokenizer: HfTokenizer, defaults: Mapping[str, Any]
) -> ChatTemplate:
    override = options.tuning.chat_template
    if override is None:
        renderer = make_renderer(hf_tokenizer, defaults)
        return ChatTemplate(renderer, template_text(hf_tokenizer))
    source = _template_source(override, options.models_dir)
    hf_tokenizer.chat_template = source
    return ChatTemplate(make_jinja_renderer(hf_tokenizer), source)


def _template_source(option: str, models_dir: Path | None) -> str:
    """Return the source that the option names, or is."""
    if "{%" in option or "{{" in option:
        return option
    path = find_path(option, models_dir)
    if path is None or not path.is_file():
        raise LoadError(f"chat_template: {option!r} is neither a file nor a Jinja template")
    return path.read_text(encoding="utf-8")
