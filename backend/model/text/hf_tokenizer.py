"""Loads a checkpoint's tokenizer and chat template through transformers.

A part that is missing or does not fit raises `LoadError`.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoTokenizer, PreTrainedConfig

from backend.config import ModelOptions
from backend.errors import LoadError, UnreadableTokenizerError
from backend.model.checkpoint.config_file import read_json
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, one_line
from backend.model.checkpoint.gate import (
    require_template,
    template_source,
    tokenizer_directory,
    tokenizer_named,
)
from backend.model.checkpoint.upstream import HfTokenizer, mlx_lm_part
from backend.model.text.hf_renderer import jinja_source, make_renderer, template_text
from backend.model.text.isolated.template_pool import PROCESSES, IsolatedTemplate
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer, vocabulary_of
from backend.model.text.tokenizer_file import follow_file, read_by_file
from common.machine_memory import trim

TEMPLATE_NAME = "chat_template.jinja"

log = logging.getLogger(__name__)


def load_tokenizer(
    options: ModelOptions, directory: Path, defaults: Mapping[str, Any]
) -> tuple[Tokenizer, ChatTemplate, frozenset[int]]:
    """Return the tokenizer, the chat template, and the ids that they declare to end a reply.

    Args:
        options: May override the tokenizer, special tokens and the template.
        defaults: `TOKENIZER_DEFAULTS` of the model's module in mlx-lm.
    """
    PROCESSES.prepare()
    return _finished(options, read_tokenizer(options, directory), defaults, None)


def load_bare_tokenizer(
    options: ModelOptions, directory: Path, defaults: Mapping[str, Any]
) -> tuple[Tokenizer, ChatTemplate, frozenset[int]]:
    """Do the same as `load_tokenizer` without a template, for a process that never renders."""
    hf_tokenizer = read_tokenizer(options, directory, is_told=False)
    # Reading 260,000 tokens leaves 200 MB of free memory, and the weights come next.
    trim()
    return _finished(options, hf_tokenizer, defaults, ChatTemplate(None))


def read_tokenizer(options: ModelOptions, directory: Path, *, is_told: bool = True) -> HfTokenizer:
    """Read the tokenizer with transformers, which is the slow part.

    Args:
        options: May name another tokenizer.
        is_told: Whether to log that transformers had other rules.
    """
    with tokenizer_named(options):
        source = tokenizer_directory(options, directory)
        if options.trusts_remote_code:
            # Code of a checkpoint may look at the whole vocabulary.
            return follow_file(_read(options, source), source, is_told=is_told)
        return read_by_file(source, partial(_read, options), is_told=is_told)


def with_special_tokens(options: ModelOptions, hf_tokenizer: HfTokenizer) -> Tokenizer:
    """Return a tokenizer whose special tokens are those that the options name."""
    _set_special(hf_tokenizer, "eos_token", options.tuning.text.eos_token)
    _set_special(hf_tokenizer, "pad_token", options.tuning.text.pad_token)
    bos_id = _set_special(hf_tokenizer, "bos_token", options.tuning.text.bos_token)
    return Tokenizer(hf_tokenizer, bos_id=bos_id)


def chat_template(
    options: ModelOptions, hf_tokenizer: HfTokenizer, defaults: Mapping[str, Any]
) -> ChatTemplate:
    """Return the template of a tokenizer, or that of the options."""
    override, writes_tools = options.tuning.text.chat_template, options.tuning.text.write_tools
    if override is None:
        # Code from mlx-lm, or from a checkpoint that the load trusts to run here.
        renderer = make_renderer(hf_tokenizer, defaults)
        if renderer is not None or not hf_tokenizer.chat_template:
            writes_tools = writes_tools and renderer is not None
            return ChatTemplate(renderer, template_text(hf_tokenizer), writes_tools=writes_tools)
    else:
        hf_tokenizer.chat_template = template_source(override, options.models_dir)
    return IsolatedTemplate(jinja_source(hf_tokenizer), writes_tools=writes_tools)


def require_own_template(options: ModelOptions, hf_tokenizer: HfTokenizer, directory: Path) -> None:
    """Refuse a template of the checkpoint that is no text, or cannot be parsed.

    Args:
        directory: Of the tokenizer.
    """
    is_used = hf_tokenizer.chat_template and options.tuning.text.chat_template is None
    if not is_used or make_renderer(hf_tokenizer, {}) is not None:
        return
    file = directory / TEMPLATE_NAME
    place = str(file if file.is_file() else directory)
    try:
        _require_template(hf_tokenizer)
    except UPSTREAM_FAILURES as error:
        raise LoadError(f"{place}: the chat template is of no use: {one_line(error)}") from error
    except LoadError as error:
        raise LoadError(f"{place}: {error}") from error


def _require_template(hf_tokenizer: HfTokenizer) -> None:
    found = hf_tokenizer.chat_template
    texts = found.values() if isinstance(found, dict) else [found]
    if not all(isinstance(text, str) for text in texts):
        raise LoadError("the chat template is no text")
    source = jinja_source(hf_tokenizer)
    for text in {source.plain, source.with_tools}:
        require_template(text)


def _finished(
    options: ModelOptions,
    hf_tokenizer: HfTokenizer,
    defaults: Mapping[str, Any],
    template: ChatTemplate | None,
) -> tuple[Tokenizer, ChatTemplate, frozenset[int]]:
    own_eos_id = hf_tokenizer.eos_token_id
    tokenizer = with_special_tokens(options, hf_tokenizer)
    eos_ids = {own_eos_id, hf_tokenizer.eos_token_id, *defaults.get("eos_token_ids", ())}
    template = template or chat_template(options, hf_tokenizer, defaults)
    return tokenizer, template, frozenset(eos_ids - {None})


def _read(options: ModelOptions, directory: Path) -> HfTokenizer:
    # Importing it registers mlx-lm's own tokenizers.
    mlx_lm_part("tokenizer_utils")
    trust = {"trust_remote_code": options.trusts_remote_code}
    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(directory, **trust)
    except StrictDataclassClassValidationError as error:
        # It knows fewer layer types than mlx-lm, and tokenizers do not depend on them.
        log.warning("transformers refuses config.json: %s", one_line(error))
        hf_tokenizer = AutoTokenizer.from_pretrained(directory, config=PreTrainedConfig(), **trust)
    except UPSTREAM_FAILURES as error:
        if isinstance(error, MemoryError) or "trust_remote_code" in str(error):
            raise
        reason = one_line(error)
        raise UnreadableTokenizerError(
            f"{directory} has no readable tokenizer: {reason}"
        ) from error
    # transformers invents a vocabulary for some model types without files.
    if len(hf_tokenizer) <= len(hf_tokenizer.added_tokens_decoder):
        raise LoadError(f"{directory} has no tokenizer: none of its files has a vocabulary")
    # Checkpoints with towers keep their template with the processor.
    own_file = directory / "chat_template.json"
    if not hf_tokenizer.chat_template and own_file.is_file():
        hf_tokenizer.chat_template = read_json(own_file, dict).get("chat_template")
    return hf_tokenizer


def _set_special(hf_tokenizer: HfTokenizer, role: str, text: str | None) -> int | None:
    """Assign a role, such as EOS, to a token of the vocabulary; return its id."""
    if text is None:
        return None
    token_id = vocabulary_of(hf_tokenizer).get(text)
    if token_id is None:
        raise LoadError(f"{text!r} is not a token of this model", field=role)
    setattr(hf_tokenizer, role, text)
    return token_id
