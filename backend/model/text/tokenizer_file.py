"""Makes a tokenizer of transformers follow its checkpoint's tokenizer.json.

transformers 5 rebuilds many classes from the vocabulary alone, with the rules of the class rather
than the file's: GPT2Tokenizer, GPTNeoXTokenizer, CodeGenTokenizer, LlamaTokenizer and more. The
model was trained with those of the file.

Such a class keeps its vocabulary as Python objects, too: 300 MB for 260,000 tokens. So it gets an
excerpt, and the whole vocabulary is in Rust only.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import msgspec
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from backend.core.prompt import JsonValue
from backend.errors import LoadError, UnreadableTokenizerError
from backend.model.checkpoint.config_file import read_json
from backend.model.checkpoint.failures import UPSTREAM_FAILURES
from backend.model.checkpoint.upstream import HfTokenizer
from backend.model.text.reading import is_plain

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
# These name tokens too.
_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Digits, white space, scripts, marks, code: rules of splitting and normalising differ on these.
SAMPLE = (
    "Rules\n\n1. Only 12345, or 3.14e-10 (½, ², Ⅳ, ١٢٣, १२३)!\n\n\n  two   spaces\t\ttabs\r\n \n"
    "def f(x_1):\n    return {'a': [x**2, 0x1F]}  # don't, we'LL\n- key: \"value\"\n"
    "Größe naïve ﬁn Å e\u0301 ЁЛКА ΑΒΓ עברית العربية हिन्दी ไทย 日本語とカナ 中文。한국어 🎉👩‍👩‍👧\n"
    "\u00a0\u200b\u3000end... ?! <b>&amp;</b> www.a-b.org/x?y=1 CamelCase snake_case END "
)
_AFFIXES = "continuing_subword_prefix", "end_of_word_suffix"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_FAILURES: tuple[type[BaseException], ...] = (
    LoadError,
    msgspec.MsgspecError,
    *UPSTREAM_FAILURES,
)

Read: TypeAlias = Callable[[Path], HfTokenizer]
"""Has transformers read the tokenizer in a directory."""


def read_by_file(directory: Path, read: Read, *, is_told: bool = True) -> HfTokenizer:
    """Return a tokenizer with the rules and tokens of the file, as `follow_file` does.

    transformers sees an excerpt of its vocabulary, where its class just passes texts on.

    Args:
        is_told: As for `follow_file`.
    """
    if not (directory / TOKENIZER_FILE).is_file():
        return follow_file(read(directory), directory)
    published = _published(directory)
    try:
        with _excerpt(directory, published) as folder:
            hf_tokenizer = read(folder)
            if hf_tokenizer.is_fast and is_plain(type(hf_tokenizer)):
                hf_tokenizer.name_or_path = str(directory)
                if is_told:
                    _tell_otherwise(hf_tokenizer, _published(folder), directory)
                return _following(hf_tokenizer, published, directory)
    except _FAILURES as error:
        log.debug("no excerpt of the tokenizer in %s: %r", directory, error)
    return follow_file(read(directory), directory, is_told=is_told)


def follow_file(hf_tokenizer: HfTokenizer, directory: Path, *, is_told: bool = True) -> HfTokenizer:
    """Return the tokenizer with normaliser, pre-tokenizer, model and so on of the file.

    Tokens that only other files of the checkpoint add stay; a checkpoint without tokenizer.json
    keeps the tokenizer that transformers made of its other files.

    Args:
        hf_tokenizer: As transformers made it; changed in place, unless it is written in Python.
        is_told: Whether to log that the library had other rules.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return hf_tokenizer
    if not hf_tokenizer.is_fast:
        if not type(hf_tokenizer).__module__.startswith("transformers."):
            return hf_tokenizer  # Code of a checkpoint that the load trusts.
        hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    published = _published(directory)
    if is_told:
        _tell_otherwise(hf_tokenizer, published, directory)
    return _following(hf_tokenizer, published, directory)


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


def _published(directory: Path) -> FastTokenizer:
    """Return the tokenizer of the file, without its limits of length."""
    try:
        published = FastTokenizer.from_file(str(directory / TOKENIZER_FILE))
    except Exception as error:
        if type(error) is not Exception:
            raise
        # That of the Rust library.
        raise UnreadableTokenizerError(f"{directory} has no readable tokenizer: {error}") from error
    published.no_truncation()
    published.no_padding()
    return published


def _following(hf_tokenizer: HfTokenizer, published: FastTokenizer, directory: Path) -> HfTokenizer:
    """Return a tokenizer of transformers after giving it the file's rules and tokens."""
    _add_tokens(published, hf_tokenizer, directory)
    hf_tokenizer._tokenizer = published  # noqa: SLF001 (has no setter)
    _forget_missing(hf_tokenizer)
    return hf_tokenizer


def _tell_otherwise(hf_tokenizer: HfTokenizer, published: FastTokenizer, directory: Path) -> None:
    """Log if the library reads a fixed text by other rules."""
    if _reads_otherwise(hf_tokenizer.backend_tokenizer, published):
        log.info(
            "tokens are those of %s: the %s of transformers has other rules",
            directory / TOKENIZER_FILE,
            type(hf_tokenizer).__name__,
        )


def _reads_otherwise(library: FastTokenizer, published: FastTokenizer) -> bool:
    """Tell whether two tokenizers divide a text otherwise, or write another one for its tokens."""
    library.no_truncation()
    library.no_padding()
    ids = published.encode(SAMPLE).ids
    if _pieces(library) != _pieces(published) or library.encode(SAMPLE).ids != ids:
        return True
    return bool(library.decode(ids) != published.decode(ids))


@contextmanager
def _excerpt(directory: Path, published: FastTokenizer) -> Iterator[Path]:
    """Yield a folder with a checkpoint's files, but with few tokens in tokenizer.json.

    These are the tokens that the files name and the characters of `SAMPLE`, renumbered. Its rules
    are the same, but nothing is merged.
    """
    file = _object((directory / TOKENIZER_FILE).read_bytes())
    added = msgspec.json.decode(file["added_tokens"], type=list[dict[str, Any]])
    processor = _value(file, "post_processor")
    named = {*(token["content"] for token in added), *_texts(processor), *_texts_of(directory)}
    ids, model = _few(_object(file["model"]), published, named)
    for token in added:
        token["id"] = ids.setdefault(token["content"], len(ids))
    changed = {
        "model": model,
        "added_tokens": added,
        "post_processor": _renumbered(processor, ids),
    }
    with TemporaryDirectory(prefix="mlx-grpc-backend-") as name:
        for path in directory.iterdir():
            if path.name != TOKENIZER_FILE:
                (Path(name) / path.name).symlink_to(path.absolute())
        (Path(name) / TOKENIZER_FILE).write_bytes(msgspec.json.encode({**file, **changed}))
        yield Path(name)


def _few(
    model: Mapping[str, msgspec.Raw], published: FastTokenizer, named: Collection[str]
) -> tuple[dict[str, int], Mapping[str, Any]]:
    """Return new ids of few tokens of a model, and its JSON with no others.

    Args:
        model: Its JSON.
        named: Tokens to keep beside the characters of `SAMPLE`.
    """
    characters = set("".join(_pieces(published)))
    prefix, suffix = (_value(model, name) or "" for name in _AFFIXES)
    wanted = {*characters, *named, *_BYTES, _value(model, "unk_token") or ""}
    wanted |= {prefix + one for one in characters} | {one + suffix for one in characters}
    unknown_id = _value(model, "unk_id")
    unknown = "" if unknown_id is None else published.model.id_to_token(unknown_id)
    tokens = sorted(
        one for one in {*wanted, unknown} if published.model.token_to_id(one) is not None
    )
    ids = {token: number for number, token in enumerate(tokens)}
    if "unk_id" in model:  # A unigram model, whose tokens have scores.
        scored = [(token, 0.0) for token in tokens]
        return ids, {**model, "vocab": scored, "unk_id": ids.get(unknown)}
    merges: dict[str, Any] = {"merges": []} if "merges" in model else {}
    return ids, {**model, **merges, "vocab": dict(ids)}


def _pieces(tokenizer: FastTokenizer) -> Sequence[str]:
    """Return the pieces into which `SAMPLE` is divided before the model sees it."""
    normalizer, rules = tokenizer.normalizer, tokenizer.pre_tokenizer
    text = normalizer.normalize_str(SAMPLE) if normalizer else SAMPLE
    return [piece for piece, _ in rules.pre_tokenize_str(text)] if rules else [text]


def _object(text: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return a JSON object with values that are still JSON: some are megabytes."""
    return msgspec.json.decode(text, type=dict[str, msgspec.Raw])


def _value(parts: Mapping[str, msgspec.Raw], name: str) -> Any:  # noqa: ANN401 (any JSON)
    return msgspec.json.decode(parts[name]) if name in parts else None


def _renumbered(processor: Any, ids: Mapping[str, int]) -> Any:  # noqa: ANN401 (any JSON)
    """Return a post-processor that adds the same tokens with new ids."""
    match processor:
        case {"processors": parts}:
            return {**processor, "processors": [_renumbered(part, ids) for part in parts]}
        case {"special_tokens": dict(added)}:
            new = {
                name: {**token, "ids": [ids[text] for text in token["tokens"]]}
                for name, token in added.items()
            }
            return {**processor, "special_tokens": new}
        case {"sep": [sep, _], "cls": [cls, _]}:
            return {**processor, "sep": [sep, ids[sep]], "cls": [cls, ids[cls]]}
    return processor


def _add_tokens(published: FastTokenizer, library: HfTokenizer, directory: Path) -> None:
    """Add the tokens that are not in the file, and set whether the others are special.

    A class has defaults for roles, such as "<|endoftext|>", that the model may never have seen.
    """
    own = {token.content: token for token in published.get_added_tokens_decoder().values()}
    defaults = set(library.special_tokens_map.values()).difference(_texts_of(directory))
    for _, token in sorted(library.added_tokens_decoder.items()):
        known = own.get(token.content)
        if known is not None and known.special != token.special:
            twin = copy(known)
            twin.special = token.special
            published.add_tokens([twin])
        elif known is None and not (
            token.content in defaults and published.token_to_id(token.content) is None
        ):
            published.add_tokens([token])


def _texts_of(directory: Path) -> Iterator[str]:
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
