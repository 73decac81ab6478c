"""The files of a checkpoint: config.json, profiles, indexes, and the headers of weights."""

import json
import math
import re
import stat
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, Union, get_args, get_origin, get_type_hints

from backend.config import (
    MAX_CHECKPOINT_JSON_CONTAINERS,
    MAX_CHECKPOINT_JSON_VALUES,
    MAX_LAYERS,
    ModelOptions,
    TuningOptions,
)
from backend.core.scoring import DecisionProfile, EmbeddingProfile, Pooling, RerankerKind
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.upstream import import_mlx_lm
from common.log import shortened

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20
_LFS_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"
# Of the types that MLX reads.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
}


def require_whole(path: Path) -> None:
    """Check that a file holds all tensors listed in its header; reads only the header."""
    size = require_regular(path)
    if size == 0:
        raise LoadError(f"{path} is empty: download it again")
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise LoadError(
                f"{path} is a git-lfs pointer, not the weights: `git lfs pull` fetches them"
            )
        file.seek(0)
        needed = _needed_bytes(path, file, size)
    if needed is None:
        raise LoadError(f"{path} is not a safetensors file: its header cannot be read")
    if size < needed:
        raise LoadError(f"{path} is truncated: it has {size} of {needed} bytes; download it again")


def tensor_shapes(path: Path) -> Mapping[str, Sequence[int]]:
    """Return the shapes of a file's tensors by name; `require_whole` has checked it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: row["shape"] for name, row in header.items() if name != _METADATA}


def require_regular(path: Path) -> int:
    """Return the size of a regular file, which can be read."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
    except OSError as error:
        # A hub's cache has links to files that are still to be downloaded.
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{path} is not a regular file")
    return status.st_size


def _needed_bytes(path: Path, file: BinaryIO, size: int) -> int | None:
    """Return the required length of a file in bytes, or `None` if its header cannot be read."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 0 < length <= _MAX_HEADER_BYTES:
        return None
    if size < (begin := _LENGTH_BYTES + length):
        return begin
    try:
        header: dict[str, Any] = json.loads(of_few_values(file.read(length)))
        told = header.pop(_METADATA, {})
        if isinstance(told, dict) and not all(isinstance(text, str) for text in told.values()):
            return None
        rows = header.values()
        for kind in {row["dtype"] for row in rows}.difference(_BITS):
            problem = f"has weights of type {shortened(repr(kind))}, which MLX does not read"
            raise UnsupportedModelError(f"{path} {problem}")
        spans = sorted(map(_span, rows))
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    # Tensors follow one another without a gap, as the format has it.
    end = 0
    for first, last in spans:
        if first != end:
            return None
        end = last
    return begin + end


def _span(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor begins and ends, in bytes after the header."""
    first, last = row["data_offsets"]
    shape: Sequence[int] = row["shape"]
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError
    if last < first or math.prod(shape) * _BITS[row["dtype"]] != 8 * (last - first):
        raise ValueError
    return first, last


MAX_QUOTED_CHARS = 60


@dataclass(frozen=True, slots=True)
class _Rule:
    """The allowed values of a field, alone or in a list.

    Attributes:
        least: Minimum for the decoder; other parts of a model may use 0 for absent features.
        most: Maximum for all parts.
        is_whole: Whether the value must be a whole number.
    """

    names: frozenset[str]
    least: float
    most: float
    is_whole: bool = True

    def allows(self, value: object, *, is_decoder: bool) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not math.isfinite(value) or (self.is_whole and value != math.trunc(value)):
            return False
        return (self.least if is_decoder else 0) <= value <= self.most

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind} from {self.least:.15g} to {self.most:.15g}"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The limits are far above any existing model; beyond them MLX overflows or takes all memory.
_RULES = (
    _Rule(_names("hidden_size d_model n_embd model_dim embedding_size"), 1, 2**20),
    _Rule(_names("vocab_size"), 1, 2**24),
    _Rule(_names("intermediate_size moe_intermediate_size ffn_hidden_size n_inner"), 0, 2**24),
    _Rule(_names("num_attention_heads num_heads n_heads n_head"), 1, 2**14),
    _Rule(_names("num_key_value_heads num_kv_heads n_kv_heads"), 0, 2**14),
    _Rule(_names("head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim"), 0, 2**16),
    _Rule(_names("num_hidden_layers n_layers n_layer"), 1, MAX_LAYERS),
    _Rule(
        _names(
            "num_layers depth num_encoder_layers num_decoder_layers encoder_layers decoder_layers"
        ),
        0,
        MAX_LAYERS,
    ),
    _Rule(
        _names(
            "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps "
            "norm_epsilon post_norm_eps"
        ),
        0,
        1,
        is_whole=False,
    ),
    _Rule(_names("rope_theta rope_local_base_freq rope_local_theta"), 0, 1e15, is_whole=False),
)
_RULE_OF = {name: rule for rule in _RULES for name in rule.names}
_QUANTIZATION = ("quantization", "quantization_config")
_OBJECTS = _names("text_config rope_scaling rope_parameters").union(_QUANTIZATION)
_ROPE = ("rope_scaling", "rope_parameters")
_ROPE_FACTOR = _Rule(_names("factor"), 1e-6, 1e6, is_whole=False)
_DECODERS = ("", "text_config")

_FIELD = re.compile(r"[Ff]ield '(\w+)' (expected|with value)")
_ROPE_TYPE = re.compile(r"(?i)\b(rope|rotary)\b.*\btype\b|\btype\b.*\brope\b")
_LIBRARIES = ("mlx.", "mlx_lm.", "mlx_vlm.")
_QUANTIZING = re.compile(r"quant|awq")
_KINDS: Mapping[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int, float),
    float: (int, float),
    str: (str,),
    list: (list,),
    tuple: (list,),
    dict: (dict,),
}

_SPOKEN: Mapping[type, str] = {
    int: "a number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def require_sensible(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse values that no model has."""
    for place, level in _levels(config):
        for name, value in level.items():
            problem = _problem(place, name, value)
            if problem is not None:
                raise LoadError(_message(path, place, name, value, problem))


def explain(failure: BaseException, path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the value of config.json that made the library fail, or `None` if none stands out."""
    text = str(failure)
    if match := _FIELD.search(text):
        return _message_about(path, config, match[1], "it does not fit the field")
    if _is_about_quantization(failure) and (reason := _of_quantization(failure, path, config)):
        return reason
    if _ROPE_TYPE.search(text) or isinstance(failure, KeyError):
        name = next((name for name in _ROPE if isinstance(config.get(name), Mapping)), None)
        if name is not None:
            problem = f"it lacks {text}" if isinstance(failure, KeyError) else text
            return _message(path, "", name, config[name], problem)
    for name, kinds in _declared(config):
        if name in config and not isinstance(config[name], tuple(kinds)):
            expected = " or ".join(dict.fromkeys(_SPOKEN[k] for k in _SPOKEN if k in kinds))
            return _message(path, "", name, config[name], f"{expected} belongs there")
    return None


def _is_about_quantization(failure: BaseException) -> bool:
    """Tell whether a library failed where it quantises a network, or packs weights anew."""
    functions = (
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(failure.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(_LIBRARIES)
    )
    return any(_QUANTIZING.search(text) for text in (*functions, str(failure)))


def _of_quantization(failure: BaseException, path: Path, config: Mapping[str, Any]) -> str | None:
    match failure:
        case KeyError():
            problem = f"it lacks {failure}"
        case NameError():
            # Nothing but mlx-lm's own variable, which no weight has set.
            problem = "it does not fit the weights"
        case _:
            problem = f"it does not fit: {' '.join(str(failure).split())}"
    for name in _QUANTIZATION:
        if any(level.get(name) is not None for _, level in _levels(config)):
            return _message_about(path, config, name, problem)
    other = path.with_name(QUANTIZATION_NAME)
    return f"{other}: {problem}" if other.is_file() else None


def _problem(place: str, name: str, value: object) -> str | None:
    if value is None:
        return None
    if name in _OBJECTS:
        return None if isinstance(value, Mapping) else "an object belongs there"
    if name == "architectures":
        return None if isinstance(value, list | str) else "a list belongs there"
    rule = _RULE_OF.get(name)
    if name == "factor" and place.rpartition(".")[2] in _ROPE:
        rule = _ROPE_FACTOR
    if rule is None or isinstance(value, Mapping):
        return None
    values = value if isinstance(value, list) else [value]
    is_decoder = place in _DECODERS or rule is _ROPE_FACTOR
    if all(each is None or rule.allows(each, is_decoder=is_decoder) for each in values):
        return None
    return f"{rule} belongs there"


def _levels(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a configuration and those nested in it, each with its path."""
    levels: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while levels:
        place, level = levels.pop()
        yield place, level
        for name, value in level.items():
            if isinstance(value, Mapping):
                levels.append((f"{place}.{name}".lstrip("."), value))


def _declared(config: Mapping[str, Any]) -> Iterator[tuple[str, Collection[type]]]:
    """Yield the fields declared by mlx-lm's code of the model, with their accepted types."""
    try:
        _, arguments = import_mlx_lm()._get_classes(config)  # noqa: SLF001 (no public equivalent)
        hints = get_type_hints(arguments)
    except Exception:  # noqa: BLE001 (foreign code, used only for an explanation)
        return
    for name, hint in hints.items():
        kinds = _kinds(hint)
        if kinds:
            yield name, kinds


def _kinds(hint: object) -> set[type]:
    """Return the JSON types that an annotation allows; empty if it is too vague."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_kinds(part) for part in get_args(hint)]
        return set().union(*parts) if all(parts) else set()
    plain = get_origin(hint) or hint
    if plain is type(None):
        return {type(None)}
    return set(_KINDS.get(plain, ())) if isinstance(plain, type) else set()


def _message_about(path: Path, config: Mapping[str, Any], name: str, problem: str) -> str | None:
    for place, level in _levels(config):
        if name in level:
            return _message(path, place, name, level[name], problem)
    return None


def _message(path: Path, place: str, name: str, value: object, problem: str) -> str:
    quoted = repr(value)
    if len(quoted) > MAX_QUOTED_CHARS:
        quoted = f"{quoted[:MAX_QUOTED_CHARS]}..."
    return f"{path}: {f'{place}.{name}'.lstrip('.')} is {quoted}: {problem}"


CONFIG_NAME = "config.json"
# NVIDIA ModelOpt's, which counts where config.json has none.
QUANTIZATION_NAME = "hf_quant_config.json"
WEIGHTS_PATTERN = "model*.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

Json = TypeVar("Json", dict[str, Any], list[Any])
_JSON_NAMES: Mapping[type, str] = {dict: "object", list: "array"}

_FOREIGN_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".npz", ".safetensors", ".onnx")
_SPAN_NAME = re.compile(r"(window|window_size|chunk_size|block_size|index_topk|indexer_budget)$")
_TOWER_PREFIXES = ("vision", "audio", "perceiver", "projector")
_LENGTH_NAMES = (
    *("max_position_embeddings", "max_sequence_length", "max_seq_len", "max_seq_length"),
    *("model_max_length", "seq_length", "n_positions", "n_ctx"),
)


def config_path(directory: Path) -> Path:
    """Return the path of config.json, which exists."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise UnsupportedModelError(
            f"{directory} is not an MLX or safetensors model: it has no config.json"
            f"{_found(directory)}"
        )
    return path


def read_config(directory: Path) -> Mapping[str, Any]:
    """Return the content of config.json."""
    path = config_path(directory)
    config = read_json(path, dict)
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedModelError(f"{path} does not name a model_type")
    require_sensible(path, config)
    quantization = directory / QUANTIZATION_NAME
    if "quantization_config" not in config and quantization.is_file():
        read_json(quantization, dict)
    return config


def require_weights(directory: Path) -> None:
    """Check that all weight files exist."""
    if not any(directory.glob(WEIGHTS_PATTERN)):
        raise UnsupportedModelError(
            f"{directory} has no weights in safetensors files ({WEIGHTS_PATTERN})"
            f"{_found(directory)}"
        )
    _require_listed(directory)
    for path in sorted(directory.glob(WEIGHTS_PATTERN)):
        require_whole(path)


def _require_listed(directory: Path) -> None:
    shards = set(indexed_files(directory).values())
    present = {path.name for path in directory.iterdir() if path.is_file()}
    if missing := sorted(shards - present):
        raise LoadError(
            f"{directory} is incomplete: {len(missing)} of {len(shards)} weight files are "
            f"missing, {shortened(missing[0])} among them"
        )


def indexed_files(directory: Path) -> Mapping[str, str]:
    """Return the file of each weight by the index of a checkpoint; empty without an index."""
    index = directory / WEIGHTS_INDEX
    files = read_json(index, dict).get("weight_map", {}) if index.is_file() else {}
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise LoadError(f"{index}: weight_map is not an object of file names")
    return files


def read_generation_config(directory: Path) -> Mapping[str, Any]:
    """Return the content of generation_config.json; empty if it is missing or broken."""
    path = directory / "generation_config.json"
    try:
        return read_json(path, dict) if path.is_file() else {}
    except LoadError:
        return {}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the decoder: all of one for text alone."""
    part: Mapping[str, Any] = config.get("text_config") or config
    return part


def own_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the model's context length in tokens, or `None` if it sets no limit."""
    for level in (config, config.get("text_config") or {}):
        for name in _LENGTH_NAMES:
            if isinstance(value := level.get(name), int) and value > 0:
                return value
    return None


def attention_spans(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the lengths of windows, blocks and block selections, in tokens.

    Attention takes another path beyond each of them. Those of towers are left out.
    """
    text = {k: v for k, v in config.items() if not k.startswith(_TOWER_PREFIXES)}
    spans: set[int] = set()
    for _, level in _levels(text):
        named = {name: value for name, value in level.items() if isinstance(value, int)}
        spans.update(value for name, value in named.items() if _SPAN_NAME.search(name))
        block, count = named.get("sparse_block_size", 0), named.get("sparse_topk_blocks", 0)
        spans.add(block * count)
    return frozenset(span for span in spans if span > 1)


def declared_eos_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that any of the configurations declares as ending a reply."""
    ids: set[int] = set()
    for config in configs:
        for level in (config, config.get("text_config") or {}):
            value = level.get("eos_token_id")
            declared = value if isinstance(value, Sequence) else [value]
            ids.update(each for each in declared if isinstance(each, int))
    return frozenset(ids)


def read_json(path: Path, kind: type[Json]) -> Json:
    """Return the content of a JSON file."""
    try:
        value = json.loads(of_few_values(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, kind):
        raise LoadError(f"{path} is not a JSON {_JSON_NAMES[kind]}")
    return value


def of_few_values(text: bytes) -> bytes:
    """Return JSON that is parsed in a moment.

    Raises:
        ValueError: It may have too many values; those in its texts count too.
    """
    containers = text.count(b"[") + text.count(b"{")
    if containers > MAX_CHECKPOINT_JSON_CONTAINERS or text.count(b",") > MAX_CHECKPOINT_JSON_VALUES:
        raise ValueError(
            f"it has more than {MAX_CHECKPOINT_JSON_CONTAINERS} objects and lists, or "
            f"{MAX_CHECKPOINT_JSON_VALUES} values"
        )
    return text


def _found(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir() if path.suffix in _FOREIGN_WEIGHTS)
    return f"; found {', '.join(names[:3])}" if names else ""


DRAFTING = frozenset({"auto", "draft", "mtp"})
"""Values of the option `speculation` that enable a named draft model."""

_SCHEME = re.compile(r"^(hf|huggingface):/+")


def draft_options(options: ModelOptions) -> ModelOptions | None:
    """Return the options to load the draft model with, or `None` without one."""
    speculation = options.tuning.speculation
    if not speculation.draft_model or speculation.speculation not in DRAFTING:
        return None
    if asks_for_several(options):
        return None
    checkpoint = options.tuning.checkpoint
    return ModelOptions(
        model=_wanted(speculation.draft_model, options.models_dir),
        models_dir=options.models_dir,
        trust_remote_code=options.trust_remote_code,
        dtype=options.dtype,
        tuning=TuningOptions(checkpoint=replace(checkpoint, vision=False)),
    )


def asks_for_several(options: ModelOptions) -> bool:
    """Tell whether a model is to be divided among processes, which rules out a draft model."""
    group = options.tuning.group
    return (group.tensor_parallel_size or 1) > 1 or bool(group.hosts or group.hostfile)


def _wanted(text: str, models_dir: Path | None) -> str:
    """Return the requested name; hosts always put the models directory before it.

    The name may be a path below that directory, a hub id or an absolute path.
    """
    path = Path(text)
    if models_dir is None or path.exists() or not path.is_relative_to(models_dir):
        return text
    inner = str(path.relative_to(models_dir))
    absolute = Path("/", inner)
    return str(absolute) if absolute.exists() else _SCHEME.sub(r"\1://", inner)


_MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_POOLING_FLAG = re.compile(r"pooling_mode_(?P<mode>\w+?)(_tokens?)?")
_KNOWN_PARTS = frozenset({"transformer", "pooling", "normalize"})
_POOLING_MODES = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST, "cls": Pooling.CLS}


def embedding_profile(directory: Path, name: str, config: Mapping[str, Any]) -> EmbeddingProfile:
    """Return how a checkpoint computes embeddings.

    Args:
        name: Name of the model; identifies embedding models without these files.
    """
    parts = _parts(directory / _MODULES)
    modes = _pooling_modes(directory / _POOLING)
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return EmbeddingProfile(obstacle="its attention looks ahead, decoders here do not")
    is_embedder = bool(parts) or "embed" in name.lower()
    return _profile(parts, modes, Pooling.LAST if is_embedder else Pooling.MEAN)


def encoder_profile(directory: Path) -> EmbeddingProfile:
    """Return how an encoder embeds: the mean of all tokens, unless its files say otherwise."""
    return _profile(
        _parts(directory / _MODULES), _pooling_modes(directory / _POOLING), Pooling.MEAN
    )


def reranker_kind(name: str, config: Mapping[str, Any]) -> RerankerKind | None:
    """Return the reranker family of a checkpoint, if any."""
    is_qwen3 = config.get("model_type") == "qwen3" and "rerank" in name.lower()
    return RerankerKind.QWEN3 if is_qwen3 else None


# Questions of decision models, by their names in config.json and here.
_QUESTIONS = {"choice": "choice", "score": "score", "noul": "bool"}
_TEMPERATURES = (0.5, 5.0)


def decision_profile(config: Mapping[str, Any]) -> DecisionProfile | None:
    """Return how a decision model answers, with temperatures as mlx-vlm takes them.

    Returns:
        `None` for other models.
    """
    read = _DECIDERS.get(str(config.get("model_type")))
    try:
        return read and read(config)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        problem = f"config.json: the settings of decisions are not whole: {error!r}"
        raise UnsupportedModelError(problem) from None


def _laya(config: Mapping[str, Any]) -> DecisionProfile:
    settings = config["decision_config"]
    found = {name: settings["temperature"][i] for i, name in enumerate(_QUESTIONS)}
    found |= settings.get("temperature_by_options") or {}
    return DecisionProfile(
        temperatures={_question(name): _clamped(each) for name, each in found.items()},
        question_tokens=int(settings["head_max_len"]),
    )


def _d1_omni(config: Mapping[str, Any]) -> DecisionProfile:
    found = config.get("temperatures") or {}
    return DecisionProfile(
        temperatures={_question(name): _positive(each) for name, each in found.items()}
    )


def _decider2(config: Mapping[str, Any]) -> DecisionProfile:
    settings = config["decision_config"]
    common, by_type = settings["temperature"], settings.get("temperature_by_type") or {}
    found = {name: by_type.get(name, common) for name in _QUESTIONS}
    return DecisionProfile(
        temperatures={_question(name): _positive(each) for name, each in found.items()},
        isolates_levels=bool(settings.get("isolated_levels")),
    )


_DECIDERS: Mapping[str, Callable[[Mapping[str, Any]], DecisionProfile]] = {
    "laya": _laya,
    "d1_omni": _d1_omni,
    "decider2": _decider2,
    "clef": lambda _: DecisionProfile(),
    "d1": lambda _: DecisionProfile(),
}


def _question(name: str) -> str:
    """Return the name of a temperature: a type of question, perhaps with a number of options."""
    kind, colon, options = name.partition(":")
    return _QUESTIONS.get(kind, kind) + colon + options


def _clamped(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        return 1.0
    low, high = _TEMPERATURES
    return min(high, max(low, number)) if math.isfinite(number) else 1.0


def _positive(value: object) -> float:
    number = float(str(value))
    if not 0 < number < math.inf:
        raise ValueError(f"a temperature of {number}")
    return number


def _profile(parts: Sequence[str], modes: Sequence[str], default: Pooling) -> EmbeddingProfile:
    if foreign := [part for part in parts if part not in _KNOWN_PARTS]:
        return EmbeddingProfile(obstacle=f"modules.json has an unknown part: {foreign[0]}")
    if modes and (len(modes) > 1 or modes[0] not in _POOLING_MODES):
        return EmbeddingProfile(obstacle=f"its pooling mode is unknown: {' and '.join(modes)}")
    return EmbeddingProfile(
        pooling=_POOLING_MODES[modes[0]] if modes else default,
        is_normalized="normalize" in parts,
    )


def _parts(path: Path) -> list[str]:
    """Return the types of a model's parts, in lower case."""
    modules = read_json(path, list) if path.is_file() else []
    if not all(isinstance(module, dict) for module in modules):
        raise LoadError(f"{path} has parts that are not objects")
    return [str(module.get("type")).rpartition(".")[2].lower() for module in modules]


def _pooling_modes(path: Path) -> list[str]:
    """Return the enabled modes, which are given as flags or as a list of names."""
    pooling = read_json(path, dict) if path.is_file() else {}
    if modes := pooling.get("pooling_mode"):
        names = modes if isinstance(modes, list) else [modes]
        if not all(isinstance(name, str) for name in names):
            raise LoadError(f"{path}: pooling_mode is neither a name nor a list of names")
        return names
    flags = [name for name, value in pooling.items() if value is True]
    return [match["mode"] for flag in flags if (match := _POOLING_FLAG.fullmatch(flag))]
