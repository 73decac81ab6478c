"""Finds impossible values in config.json.

Values with a rule are checked before MLX builds the model, others only after it has failed.
"""

import math
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from backend.config import MAX_LAYERS
from backend.errors import LoadError
from backend.model.checkpoint.upstream import import_mlx_lm

MAX_QUOTED_CHARS = 60


@dataclass(frozen=True, slots=True)
class _Rule:
    """The allowed values of a field, alone or in a list.

    Attributes:
        names: Names of the fields.
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
_OBJECTS = _names("text_config quantization rope_scaling rope_parameters")
_ROPE = ("rope_scaling", "rope_parameters")
_ROPE_FACTOR = _Rule(_names("factor"), 1e-6, 1e6, is_whole=False)
_DECODERS = ("", "text_config")

_FIELD = re.compile(r"[Ff]ield '(\w+)' (expected|with value)")
_ROPE_TYPE = re.compile(r"(?i)\b(rope|rotary)\b.*\btype\b|\btype\b.*\brope\b")
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
    """Refuse values that no model has.

    Args:
        path: Path of the file, for the message.
        config: Content of the file.

    Raises:
        LoadError: The message names file, field and value.
    """
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
