"""Makes a tokenizer of transformers follow its checkpoint's tokenizer.json.

transformers 5 rebuilds many classes from the vocabulary alone, with the rules of the class rather
than the file's: GPT2Tokenizer, GPTNeoXTokenizer, CodeGenTokenizer, LlamaTokenizer and more. The
model was trained with those of the file.
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from backend.core.prompt import JsonValue
from backend.model.checkpoint.config import read_json
from backend.model.checkpoint.upstream import HfTokenizer

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
# These name tokens too.
_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Digits, white space, scripts, marks, code: what rules of splitting and normalising disagree about.
SAMPLE = (
    "Rules\n\n1. Only 12345, or 3.14e-10 (½, ², Ⅳ, ١٢٣, १२३)!\n\n\n  two   spaces\t\ttabs\r\n \n"
    "def f(x_1):\n    return {'a': [x**2, 0x1F]}  # don't, we'LL\n- key: \"value\"\n"
    "Größe naïve ﬁn Å e\u0301 ЁЛКА ΑΒΓ עברית العربية हिन्दी ไทย 日本語とカナ 中文。한국어 🎉👩‍👩‍👧\n"
    "\u00a0\u200b\u3000end... ?! <b>&amp;</b> www.a-b.org/x?y=1 CamelCase snake_case END "
)


def follow_file(hf_tokenizer: HfTokenizer, directory: Path, *, is_told: bool = True) -> HfTokenizer:
    """Return the tokenizer with normaliser, pre-tokenizer, model and so on of the file.

    Tokens that only other files of the checkpoint add stay; a checkpoint without tokenizer.json
    keeps the tokenizer that transformers made of its other files.

    Args:
        hf_tokenizer: As transformers made it; changed in place, unless it is written in Python.
        directory: Where it was read.
        is_told: Whether to log that the library had other rules.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return hf_tokenizer
    name = type(hf_tokenizer).__name__
    if not hf_tokenizer.is_fast:
        if not type(hf_tokenizer).__module__.startswith("transformers."):
            return hf_tokenizer  # Code of a checkpoint that the load trusts.
        hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    published = FastTokenizer.from_file(str(path))
    published.no_truncation()
    published.no_padding()
    if is_told and _reads_otherwise(hf_tokenizer.backend_tokenizer, published):
        log.info("tokens are those of %s: the %s of transformers has other rules", path, name)
    _add_tokens(published, hf_tokenizer, directory)
    hf_tokenizer._tokenizer = published  # noqa: SLF001 (has no setter)
    _forget_missing(hf_tokenizer)
    return hf_tokenizer


def follow_wrapped(wrapper: HfTokenizer, directory: Path) -> None:
    """Do the same for the tokenizer in a `TokenizerWrapper` of mlx-lm."""
    wrapper._tokenizer = follow_file(wrapper._tokenizer, directory)  # noqa: SLF001 (has no setter)


def follow_held(processor: HfTokenizer, directory: Path) -> None:
    """Do the same for the tokenizer of a media processor, if it was read from there."""
    held = getattr(processor, "tokenizer", None)
    if isinstance(processor, PreTrainedTokenizerBase):
        follow_file(processor, directory, is_told=False)
    # Some of mlx-vlm's are from a place on the hub.
    elif isinstance(held, PreTrainedTokenizerBase) and Path(held.name_or_path) == directory:
        processor.tokenizer = follow_file(held, directory, is_told=False)


def keep_files(source: Path, target: Path) -> None:
    """Copy the files that define the tokens: a library writes those of its own class."""
    if (source / TOKENIZER_FILE).is_file():
        for name in (TOKENIZER_FILE, *_NAMING_FILES):
            if (source / name).is_file():
                shutil.copy(source / name, target / name)


def _reads_otherwise(library: FastTokenizer, published: FastTokenizer) -> bool:
    """Tell whether two tokenizers give a fixed text other tokens, or its tokens another text."""
    ids = published.encode(SAMPLE).ids
    library.no_truncation()
    library.no_padding()
    if library.encode(SAMPLE).ids != ids:
        return True
    return bool(library.decode(ids) != published.decode(ids))


def _add_tokens(published: FastTokenizer, library: HfTokenizer, directory: Path) -> None:
    """Add the tokens that are not in the file, and what others say about being special.

    A class has defaults for roles, such as "<|endoftext|>", that the model may never have seen.
    """
    own = {token.content: token for token in published.get_added_tokens_decoder().values()}
    defaults = set(library.special_tokens_map.values()).difference(_texts_of(directory))
    for _, token in sorted(library.added_tokens_decoder.items()):
        known = own.get(token.content)
        if known is not None and known.special != token.special:
            published.add_tokens([_marked(known, is_special=token.special)])
        elif known is None and not (
            token.content in defaults and published.token_to_id(token.content) is None
        ):
            published.add_tokens([token])


def _marked(token: AddedToken, *, is_special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=is_special,
    )


def _texts_of(directory: Path) -> Iterator[str]:
    """Yield all texts in the files that name tokens."""
    for name in _NAMING_FILES:
        path = directory / name
        if path.is_file():
            yield from _texts(read_json(path, dict))


def _texts(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _forget_missing(hf_tokenizer: HfTokenizer) -> None:
    """Take back the roles of tokens that do not exist: asking for such an id never ends."""
    for role, token in dict(hf_tokenizer.special_tokens_map).items():
        if isinstance(token, str) and hf_tokenizer.backend_tokenizer.token_to_id(token) is None:
            setattr(hf_tokenizer, role, None)
