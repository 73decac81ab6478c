"""Every file of a checkpoint that a library might read, checked before one sees the directory.

Libraries open any file with the right name: a pipe never ends, a huge file takes all memory, and
deeply nested JSON exhausts the stack.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.config import (
    MAX_ADAPTER_RANK,
    MAX_CHECKPOINT_JSON_DEPTH,
    Adapter,
    ModelOptions,
)
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import (
    config_path,
    draft_options,
    of_few_values,
    read_config,
    read_json,
    require_weights,
    require_whole,
    tensor_shapes,
)
from backend.model.checkpoint.extras import may_have_experts, mtp_layout, no_experts, no_mtp_head
from backend.model.checkpoint.hub import find_path, resolve, rooted
from common.log import shortened
from common.remedies import version_of

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "adapters.safetensors"
PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_FULL = "full"
_FINE_TUNE_TYPES = ("lora", "dora", _FULL)

# The largest number of a float32.
_MAX_FACTOR = 3.4e38
# A name of layers, with few repetitions and one choice: other patterns may take forever.
_ATOM = r"(?:[\w.-]|\\[.d]|\[[\w-]+\])"
_PATTERN = re.compile(rf"\^?(?:{_ATOM}[*+]?|\((?:\?:)?[\w.|\\-]+\))+\$?")
_MAX_PATTERNS = 4096
_MAX_PATTERN_CHARS = 512
_MAX_REPETITIONS = 2
# Other values of these fields change the meaning of the matrices.
_PLAIN_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
}


def is_peft(directory: Path) -> bool:
    """Tell whether a directory contains an adapter in PEFT's format."""
    return (directory / PEFT_WEIGHTS).is_file()


def _named_directory(text: str, models_dir: Path | None) -> Path:
    """Return the directory that a text names, or that of the file that it names."""
    if (path := find_path(text, models_dir)) is None:
        raise LoadError(f"{text} does not exist")
    return path if path.is_dir() else path.parent


def adapter_directory(adapter: Adapter, models_dir: Path | None) -> Path:
    """Return the directory of an adapter."""
    directory = _named_directory(adapter.path, models_dir)
    names = (CONFIG, PEFT_WEIGHTS if is_peft(directory) else WEIGHTS)
    if missing := next((name for name in names if not (directory / name).is_file()), ""):
        problem = (
            f"has no {missing}: it must be in mlx-lm's format, or in PEFT's with {PEFT_WEIGHTS}"
        )
        raise LoadError(f"{adapter.path} {problem}")
    return directory


def require_readable(directory: Path) -> None:
    """Check an adapter as far as its files allow."""
    path = directory / CONFIG
    config = read_json(path, dict)
    if is_peft(directory):
        _require_plain(path, config)
        _require_numbers_of_peft(path, config)
        require_whole(directory / PEFT_WEIGHTS)
        _require_pairs(directory / PEFT_WEIGHTS)
        return
    require_whole(directory / WEIGHTS)
    kind = config.get("fine_tune_type", "lora")
    if kind not in _FINE_TUNE_TYPES:
        problem = f"is {shortened(repr(kind))}, not one of {', '.join(_FINE_TUNE_TYPES)}"
        raise LoadError(f"{path}: fine_tune_type {problem}")
    if kind != _FULL:
        _require_lora(path, config)
        _require_rank_of_all(directory / WEIGHTS, config["lora_parameters"]["rank"])


def _require_scale(adapter: Adapter, directory: Path) -> None:
    config = read_json(directory / CONFIG, dict)
    if adapter.scale != 1.0 and config.get("fine_tune_type") == _FULL and not is_peft(directory):
        raise without_scale(adapter)


def without_scale(adapter: Adapter) -> LoadError:
    """Return why the scale of an adapter cannot be applied."""
    return LoadError(f"{adapter.path} is a full fine-tune: it has no scale")


def _require_lora(path: Path, config: Mapping[str, Any]) -> None:
    if not isinstance(config.get("num_layers"), int):
        raise LoadError(f"{path}: num_layers is missing or not a whole number")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise LoadError(f"{path}: lora_parameters is missing or not an object")
    _require_rank(path, "lora_parameters.rank", parameters.get("rank"))
    _require_factor(path, "lora_parameters.scale", parameters.get("scale"))
    dropout = parameters.get("dropout")
    if not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        problem = f"is {shortened(repr(dropout))}, not a number of at least 0 and below 1"
        raise LoadError(f"{path}: lora_parameters.dropout {problem}")
    keys = parameters.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(type(key) is str for key in keys)):
        raise LoadError(f"{path}: lora_parameters.keys is not a list of names")


def _require_rank_of_all(path: Path, rank: int) -> None:
    """Refuse tensors that are no part of an adapter of this rank."""
    for name, shape in tensor_shapes(path).items():
        part = name.rpartition(".")[2]
        if part not in ("lora_a", "lora_b", "m"):
            raise LoadError(f"{path}: {shortened(name)} is not a matrix of an adapter")
        if part != "m" and rank not in shape:
            problem = f"has the shape {shortened(str(shape))}, without the rank of its config"
            raise LoadError(f"{path}: {shortened(name)} {problem}, {rank}")


def _require_pairs(path: Path) -> None:
    """Refuse tensors that are no matrices A [r, in] and B [out, r] of linear layers."""
    parts: dict[str, set[str]] = defaultdict(set)
    for name, shape in tensor_shapes(path).items():
        match = PEFT_NAME.fullmatch(name)
        if match is None or len(shape) != len("AB"):
            raise LoadError(f"{path}: {shortened(name)} is not a LoRA matrix of a linear layer")
        parts[match["module"]].add(match["part"])
    for module, found in parts.items():
        if len(found) != len("AB"):
            raise LoadError(f"{path}: {shortened(module)} has a matrix A or B without the other")


def _require_rank(path: Path, name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_ADAPTER_RANK:
        problem = f"is {shortened(repr(value))}, not a whole number from 1 to {MAX_ADAPTER_RANK:,}"
        raise LoadError(f"{path}: {name} {problem}")


def _require_factor(path: Path, name: str, value: object) -> None:
    # NaN is neither.
    if not (type(value) in (int, float) and -_MAX_FACTOR <= value <= _MAX_FACTOR):  # type: ignore[operator]
        raise LoadError(
            f"{path}: {name} is {shortened(repr(value))}, not a number that is possible"
        )


def _require_numbers_of_peft(path: Path, config: Mapping[str, Any]) -> None:
    numbers = (
        ("r", "rank_pattern", _require_rank),
        ("lora_alpha", "alpha_pattern", _require_factor),
    )
    for name, field, require in numbers:
        require(path, name, config.get(name, 8))
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
            raise LoadError(f"{path}: {field} is not an object of at most {_MAX_PATTERNS} patterns")
        for pattern, value in patterns.items():
            require(path, f"{field}[{shortened(pattern)!r}]", value)
            _require_bounded(path, field, pattern)


def _require_bounded(path: Path, field: str, pattern: str) -> None:
    """Refuse a pattern that might be slow on some name of a layer, or is none."""
    repetitions = sum(map(pattern.count, "*+"))
    is_short = len(pattern) <= _MAX_PATTERN_CHARS and pattern.count("(") <= 1
    if is_short and repetitions <= _MAX_REPETITIONS and _PATTERN.fullmatch(pattern):
        with contextlib.suppress(re.error):
            re.compile(pattern)
            return
    problem = "is no name of layers: letters, digits, dots, two of * and +, and one choice (a|b)"
    raise LoadError(f"{path}: {field} {shortened(pattern)!r} {problem}")


def _require_plain(path: Path, config: Mapping[str, Any]) -> None:
    for name, values in _PLAIN_FIELDS.items():
        if config.get(name) not in values:
            raise LoadError(
                f"{path}: {name} is {config[name]!r}, which cannot be applied: only plain LoRA can"
            )


_DIGEST_BYTES = 12
# These libraries compute the KV: another version may compute it differently.
_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm")


def fingerprint(options: ModelOptions, directory: Path, types: Sequence[str]) -> str:
    """Return an alphanumeric name for a model, its adapters and the way it is run.

    Weights are identified by name, size and time: reading them all would take too long.

    Args:
        types: The data types of its weights in memory, which may not be those of its files.
    """
    memory = options.tuning.memory
    kv = [memory.kv_bits, memory.kv_group_size, options.tuning.prompt_cache.cache_bits]
    return _digest({**_weights(options, directory, types), "kv": kv})


def weights_fingerprint(options: ModelOptions, directory: Path, types: Sequence[str]) -> str:
    """Return the same name, but independent of the options of its KV caches."""
    return _digest(_weights(options, directory, types))


def _weights(options: ModelOptions, directory: Path, types: Sequence[str]) -> dict[str, Any]:
    adapters = [
        (list(weight_files(adapter_directory(adapter, options.models_dir))), adapter.scale)
        for adapter in options.adapters
    ]
    return {
        "model": list(weight_files(directory)),
        "adapters": adapters,
        "types": list(types),
        "vision": options.tuning.checkpoint.vision,
        "versions": [version_of(name) for name in _PACKAGES],
    }


def _digest(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def weight_files(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of the files that make up a model."""
    for path in sorted(directory.rglob("*")):
        # A link to nothing is no file, as `require_sound` has it.
        if path.suffix in (".json", ".safetensors", ".py") and path.exists():
            status = path.stat()
            yield str(path.relative_to(directory)), status.st_size, status.st_mtime_ns


_MIB = 2**20
# By suffix; names win. Weights have no limit of their own: memory is checked later.
_LIMITS = {
    ".json": 16 * _MIB,
    ".jinja": 4 * _MIB,
    ".txt": 256 * _MIB,
    ".model": 256 * _MIB,
    ".tiktoken": 256 * _MIB,
    ".py": 4 * _MIB,
}
# Those of Mistral and of unigram models lie beside a tokenizer.json, and are larger.
_VOCABULARIES = dict.fromkeys(
    ("tokenizer.json", "vocab.json", "tekken.json", "unigram.json"), 256 * _MIB
)
_LIMITS_BY_NAME = {**_VOCABULARIES, "model.safetensors.index.json": 64 * _MIB}
_WEIGHTS = ".safetensors"
# Their readers take them for objects of text.
_OBJECTS = frozenset(
    {
        *("config.json", "generation_config.json", "processor_config.json"),
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json"),
    }
)
# Larger ones are lists of tensors: those who read them look at their depth.
_PARSED_BYTES = 4 * _MIB
# The same of a vocabulary, of which parsing 2 MB would stop the server for 60 ms.
_PARSED_VOCABULARY_BYTES = 2**18


def tokenizer_directory(options: ModelOptions, directory: Path) -> Path:
    """Return the directory of the tokenizer."""
    if not options.tokenizer:
        return directory
    return _named_directory(options.tokenizer, options.models_dir)


def require_sound(directory: Path) -> None:
    """Refuse a directory with a file that a library must not open."""
    for entry in _entries(directory):
        path = Path(entry.path)
        limit = _LIMITS_BY_NAME.get(entry.name, _LIMITS.get(path.suffix))
        if limit is None and path.suffix != _WEIGHTS:
            continue
        size = _regular_size(path)
        if size is None or limit is None:
            continue
        _require_size(path, size, limit)
        is_vocabulary = entry.name in _VOCABULARIES
        if path.suffix == ".json" and (size <= _PARSED_VOCABULARY_BYTES or not is_vocabulary):
            _require_parsable(path, is_vocabulary=is_vocabulary)


def _require_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise LoadError(f"{path} has {size} bytes, more than the {limit} that such a file may have")


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of the directory and of those inside it, one level deep."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inner:
                        yield from inner
    except OSError as error:
        raise LoadError(f"{directory} cannot be read: {error.strerror}") from error


def _regular_size(path: Path) -> int | None:
    """Return the size of a regular file, through links; `None` if nothing is there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{path} is not a regular file")
    return status.st_size


def _require_parsable(path: Path, *, is_vocabulary: bool) -> None:
    """Refuse JSON of too many values, and if it is small, as `_require_sane_value` does.

    Any other text is for its reader to refuse.
    """
    try:
        text = path.read_bytes() if is_vocabulary else of_few_values(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if len(text) <= _PARSED_BYTES:
        _require_sane_value(path, text)


def _require_sane_value(path: Path, text: bytes) -> None:
    """Refuse JSON of too many levels, and any value but an object where readers expect that."""
    is_object = path.name in _OBJECTS
    try:
        level = [json.loads(text.decode() if is_object else text)]
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:
        if is_object and isinstance(error, UnicodeDecodeError):
            raise LoadError(f"{path} cannot be read: {error}") from None
        return
    if is_object and not isinstance(level[0], dict):
        raise LoadError(f"{path} is not a JSON object")
    for _ in range(MAX_CHECKPOINT_JSON_DEPTH):
        level = [each for value in level for each in _members(value)]
        if not level:
            return
    raise _too_deep(path)


def _members(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _too_deep(path: Path) -> LoadError:
    return LoadError(f"{path} is nested more than {MAX_CHECKPOINT_JSON_DEPTH} levels deep")


def template_source(option: str, models_dir: Path | None) -> str:
    """Return the chat template that an option is, or the file that it names."""
    if "{%" in option or "{{" in option:
        return option
    path = find_path(option, models_dir)
    if path is None or not path.is_file():
        told = shortened(repr(option))
        raise LoadError(f"{told} is neither a file nor a Jinja template", field="chat_template")
    try:
        size = path.stat().st_size
        _require_size(path, size, _LIMITS[".jinja"])
        # Reading one of the system's may never end.
        return path.read_text(encoding="utf-8") if size else ""
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise LoadError(problem, field="chat_template") from error
    except UnicodeDecodeError:
        raise LoadError(f"{path} is not UTF-8", field="chat_template") from None


# The server would be busy with a longer template for most of a second.
_MAX_TRIED_CHARS = 2**17
# Transformers alone knows it.
_SPAN_TAG = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")


def require_template(source: str) -> None:
    """Refuse a template that cannot be parsed, which no conversation could use."""
    if len(source) > _MAX_TRIED_CHARS:
        return
    # The server starts without it.
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import SandboxedEnvironment

    try:
        SandboxedEnvironment(extensions=[loopcontrols]).parse(_SPAN_TAG.sub("", source))
    except TemplateSyntaxError as error:
        problem = f"line {error.lineno} of the template: {error.message}"
        raise LoadError(problem) from None
    except RecursionError:
        raise LoadError("the template is nested too deeply") from None


def require_possible(options: ModelOptions) -> None:
    """Refuse a load that the disk alone shows to be impossible; a model of the hub may work."""
    place, own = resolve(options), rooted(options)
    draft = draft_options(own)
    with named("draft_model"):
        found = resolve(draft) if draft is not None else None
    if isinstance(place, Path):
        known = str(found.absolute()) if isinstance(found, Path) else None
        own = replace(own, tuning=own.tuning.updated(draft_model=known))
        require_loadable(own, place.absolute())


def _require_typed(path: Path) -> None:
    """Refuse a draft model's config that is none; some heads have no model type."""
    if not isinstance(read_json(path, dict).get("model_type"), str | None):
        raise UnsupportedModelError(f"{path} does not name a model_type")


@contextlib.contextmanager
def named(field: str) -> Iterator[None]:
    """Have an error tell the field or option whose value it is about."""
    try:
        yield
    except LoadError as error:
        raise type(error)(str(error), field=field) from error


def tokenizer_named(options: ModelOptions) -> contextlib.AbstractContextManager[None]:
    """Have an error name the field of another tokenizer, if there is one."""
    return named("Tokenizer") if options.tokenizer else contextlib.nullcontext()


def require_loadable(options: ModelOptions, directory: Path) -> None:
    """Refuse a load that cannot work."""
    require_sound(directory)
    if template := options.tuning.text.chat_template:
        source = template_source(template, options.models_dir)
        with named("chat_template"):
            require_template(source)
    read_config(directory)
    require_weights(directory)
    if draft := options.tuning.speculation.draft_model:
        with named("draft_model"):
            require_sound(Path(draft))
            _require_typed(config_path(Path(draft)))
    elif options.tuning.speculation.speculation == "mtp" and mtp_layout(directory) is None:
        with named("speculation"):
            raise no_mtp_head(directory)
    if options.tuning.checkpoint.keeps_experts_on_disk and not may_have_experts(directory):
        raise no_experts()
    with tokenizer_named(options):
        require_sound(tokenizer_directory(options, directory))
    for adapter in options.adapters:
        with named(adapter.field):
            place = adapter_directory(adapter, options.models_dir)
            require_sound(place)
            require_readable(place)
            _require_scale(adapter, place)
