"""Encoders, which read a text in one pass but do not generate: BERT and its kin, through mlx-vlm.

mlx-vlm is optional; without it such a checkpoint is refused with an installation hint.
"""

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from backend.config import ModelOptions
from backend.core.model import ModelCard, ModelKind
from backend.core.scoring import EmbeddingProfile, PathBiases, TagProfile
from backend.errors import LoadError, UnsupportedModelError
from backend.model.checkpoint.config_file import (
    CONFIG_NAME,
    decision_profile,
    encoder_profile,
    own_context_length,
    read_json,
)
from backend.model.checkpoint.mends import mend
from backend.model.checkpoint.upstream import Network
from backend.model.checkpoint.weights import (
    cast_weights,
    require_fractions,
    rules_out_float32,
    weights_bytes,
)
from backend.model.device import DEVICE
from backend.model.loaded import RunnableModel
from backend.model.text.hf_tokenizer import load_bare_tokenizer, load_tokenizer
from backend.model.text.tokenizer import Tokenizer
from common.remedies import vision_command

_SENTENCE_CONFIG = "sentence_bert_config.json"
_CLASSIFIER = "ForSequenceClassification"
_TAGGER = "ForTokenClassification"
# Names of families that are known by it; others by their model_type.
_ARCHITECTURES = {"BoundaryExtractor": "gliner2_5"}
# Settings of the network inside another, in config.json or in a folder of this name.
_INNER = "encoder_config"
_CALIBRATION = "viterbi_calibration.json"
_BIAS_PREFIX = "transition_bias_"

log = logging.getLogger(__name__)


# Classes of mlx-vlm's encoder modules.
_TEXTS = {ModelKind.ENCODER: "Model", ModelKind.CROSS_ENCODER: "SequenceClassificationModel"}


@dataclass(frozen=True, slots=True)
class _Family:
    """How mlx-vlm 0.7.10 runs a type of encoder.

    Attributes:
        module: Its module name under `mlx_vlm.models`.
        fixed: Values that the code hard-wires, regardless of config.json; by name, a dot for each
            object around it.
        counts_from_padding: Whether positions start after the id of the padding token.
        classes: Of the module, by the kind of the checkpoint.
        finds_path: Whether a text has the likeliest path of BIOES labels.
        length: Name of the setting with the context length, if it has a name of its own.
        longest: The context length where that is not set.
        towers: Prefixes of the weights of towers that it does without, by their classes.
        reader: Class of `backend.model.deciders` that runs the network.
        marks: Tokens that the tokenizer must have.
        roles: Kinds of special tokens that it must have.
        window: Name of the setting with the distance that attention of every layer looks ahead and
            back; empty if attention sees the whole text.
    """

    module: str
    fixed: Mapping[str, object]
    counts_from_padding: bool = False
    classes: Mapping[ModelKind, str] = field(default_factory=lambda: _TEXTS)
    length: str = ""
    longest: int = 0
    reader: str = ""
    towers: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    finds_path: bool = False
    window: str = ""


_BERT = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
_ROBERTA = _Family("xlm_roberta", _BERT, counts_from_padding=True)
# RoBERTa and CamemBERT are XLM-RoBERTa under other names.
_FAMILIES: Mapping[str, _Family] = {
    "bert": _Family("bert", _BERT, classes=_TEXTS | {ModelKind.TAGGER: "TokenClassificationModel"}),
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "modernbert": _Family("modernbert", {"hidden_activation": "gelu"}),
    # A Llama trained to look ahead.
    "llama_bidirec": _Family("llama_bidirec", {}),
    # A DeBERTa that reads labels before the text.
    "gliner2_5": _Family(
        "gliner2_5",
        {
            "architecture": "boundary",
            "token_pooling": "first",
            "hidden_act": "gelu",
            "boundary_head.candidate_pool": "shared",
            "boundary_head.candidate_attention_layers": 0,
            "boundary_head.query_attention_layers": 0,
        },
        classes={ModelKind.EXTRACTOR: "Model"},
        length="max_len",
        marks=("[SEP_TEXT]", "[P]", "[E]"),
    ),
    # A ModernBERT that answers questions.
    "laya": _Family(
        "laya",
        {"hidden_activation": "gelu"},
        classes={ModelKind.DECIDER: "Model"},
        length="decision_config.max_len",
        reader="Laya",
        roles=("cls", "sep", "mask"),
    ),
    # An LFM2 that looks ahead, and answers questions.
    "d1_omni": _Family(
        "d1_omni",
        {"text_config.conv_L_cache": 3},
        classes={ModelKind.DECIDER: "Model"},
        length="max_length",
        longest=16384,
        reader="D1Omni",
        towers={"Vision": "vision.", "Audio": "audio."},
        marks=("<|mask|>", *(f"<|reserved_{i}|>" for i in range(7, 12))),
        roles=("bos",),
    ),
    # A Qwen3.5 with a head that answers questions.
    "clef": _Family(
        "clef",
        {},
        classes={ModelKind.DECIDER: "Model"},
        longest=16384,
        reader="Clef",
    ),
    # A mixture of experts that finds private data.
    "openai_privacy_filter": _Family(
        "openai_privacy_filter",
        {},
        classes={ModelKind.TAGGER: "Model"},
        finds_path=True,
        window="sliding_window",
    ),
}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint with this config.json is an encoder that can be loaded."""
    return _family_name(config) in _FAMILIES


def _family_name(config: Mapping[str, Any]) -> str:
    named = (_ARCHITECTURES.get(str(each)) for each in config.get("architectures") or ())
    return next(filter(None, named), str(config["model_type"]))


def _whole(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a network together with those of the network inside it."""
    inner, path = config.get(_INNER), directory / _INNER / CONFIG_NAME
    if inner is None and path.is_file():
        inner = read_json(path, dict)
    return {**(inner or {}), **config}


def lazy_encoder(
    options: ModelOptions, directory: Path, config: Mapping[str, Any], *, renders: bool = True
) -> RunnableModel:
    """Build an encoder, or a cross-encoder, without reading weights into memory.

    Args:
        renders: Whether this process needs the chat template.
    """
    name = _family_name(config)
    family, config = _FAMILIES[name], _whole(directory, config)
    _require_plain(options, family, config)
    kind = _kind(family, config)
    profile = _profile(directory, kind)
    tagging = TagProfile()
    if kind is ModelKind.TAGGER:
        tagging = _tagging(family, directory, config)
    network = _lazy_network(options, directory, family, kind, len(tagging.labels))
    read = load_tokenizer if renders else load_bare_tokenizer
    tokenizer, template, _ = read(options, directory, {})
    _require_marks(family, tokenizer)
    reader = _reader(family, network)
    card = ModelCard(
        name=options.model or directory.name,
        path=str(directory),
        model_type=name,
        context_length=_context_length(options, directory, family, config),
        vocab_size=int({**(config.get("text_config") or {}), **config}["vocab_size"]),
        eos_token_ids=frozenset(),
        weights_bytes=weights_bytes(network),
        supports_tools=False,
        supports_thinking=False,
        embedding=profile,
        kind=kind,
        decisions=decision_profile({**config, "model_type": name}),
        tagging=tagging,
    )
    return RunnableModel(tokenizer, template, card, reader)


def _reader(family: _Family, network: Network) -> Network:
    """Return the network, or the reader that runs it; parts that nothing runs are taken from it."""
    if not family.reader:
        return network
    deciders = importlib.import_module("backend.model.deciders")
    return getattr(deciders, family.reader)(network)


def _kind(family: _Family, config: Mapping[str, Any]) -> ModelKind:
    architectures = tuple(map(str, config.get("architectures") or ()))
    if ModelKind.ENCODER not in family.classes:
        return next(iter(family.classes))
    if any(name.endswith(_TAGGER) for name in architectures):
        return _token_classifier(family, config)
    if not any(name.endswith(_CLASSIFIER) for name in architectures):
        return ModelKind.ENCODER
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 1)
    if labels != 1:
        raise UnsupportedModelError(
            f"the model classifies texts into {labels} classes: only cross-encoders, with one "
            "label, are supported"
        )
    return ModelKind.CROSS_ENCODER


def _token_classifier(family: _Family, config: Mapping[str, Any]) -> ModelKind:
    if ModelKind.TAGGER not in family.classes:
        known = " and ".join(
            name for name, each in _FAMILIES.items() if ModelKind.TAGGER in each.classes
        )
        raise UnsupportedModelError(
            f"mlx-vlm labels tokens with models of the types {known}, and this one is a "
            f"{config['model_type']}"
        )
    return ModelKind.TAGGER


def _tagging(family: _Family, directory: Path, config: Mapping[str, Any]) -> TagProfile:
    labels = _labels(config)
    if not family.finds_path:
        return TagProfile(labels=labels)
    _require_bioes(labels)
    return TagProfile(
        labels=labels,
        biases=_biases(directory / _CALIBRATION),
        reach=int(config[family.window]) * int(config["num_hidden_layers"]),
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    numbered = config.get("id2label") or {}
    if not numbered:
        raise UnsupportedModelError("config.json has no id2label: its labels have no names")
    try:
        return tuple(str(numbered[str(number)]) for number in range(len(numbered)))
    except KeyError as error:
        raise UnsupportedModelError(f"config.json: id2label has no label {error}") from None


def _require_bioes(labels: Sequence[str]) -> None:
    """Refuse labels among which some text has no path."""
    groups = {label.partition("-")[2] for label in labels if label != "O"}
    whole = {"O", *(f"{prefix}-{group}" for prefix in "BIES" for group in groups)}
    if wrong := sorted(whole.symmetric_difference(labels)):
        raise UnsupportedModelError(
            f"config.json: id2label must have O, and B, I, E and S of each group; see {wrong[0]!r}"
        )


def _biases(path: Path) -> PathBiases:
    """Return the calibrated biases of paths; without a calibration all are 0."""
    if not path.is_file():
        return PathBiases()
    names = [each.name for each in fields(PathBiases)]
    try:
        found = read_json(path, dict)["operating_points"]["default"]["biases"]
        return PathBiases(**{name: float(found[_BIAS_PREFIX + name]) for name in names})
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{path} has no default operating point with all biases: {error!r}"
        raise UnsupportedModelError(problem) from None


def _require_plain(options: ModelOptions, family: _Family, config: Mapping[str, Any]) -> None:
    """Refuse options and settings that the family's code would silently ignore."""
    if options.adapters:
        field = options.adapters[0].field
        raise LoadError("adapters need a decoder, and this is an encoder", field=field)
    for key, fixed in family.fixed.items():
        if (asked := _setting(config, key, fixed)) != fixed:
            raise UnsupportedModelError(f"config.json asks for {key} {asked!r}, not {fixed!r}")


def _setting(config: Mapping[str, Any], key: str, default: Any) -> Any:  # noqa: ANN401 - JSON
    name, _, rest = key.partition(".")
    value = config.get(name, {} if rest else default)
    return _setting(value, rest, default) if rest and isinstance(value, Mapping) else value


def _require_marks(family: _Family, tokenizer: Tokenizer) -> None:
    roles = [f"{role}_token" for role in family.roles]
    missing = [mark for mark in family.marks if tokenizer.token_id(mark) is None]
    missing = missing or [role for role in roles if getattr(tokenizer.hf, role) is None]
    if missing:
        raise UnsupportedModelError(f"the tokenizer has no {' and no '.join(missing)}")


def _profile(directory: Path, kind: ModelKind) -> EmbeddingProfile:
    if kind is not ModelKind.ENCODER:
        return EmbeddingProfile(obstacle=f"the model is {kind.nature}")
    profile = encoder_profile(directory)
    if profile.obstacle:
        raise UnsupportedModelError(f"{directory} cannot be used: {profile.obstacle}")
    return profile


def _lazy_network(
    options: ModelOptions, directory: Path, family: _Family, kind: ModelKind, labels: int
) -> Network:
    """Build the network without reading weights; `labels` is 0 unless tokens have some."""
    load = _import_loader(directory).load_encoder_model
    with _towers_left_out(family):
        network = load(
            directory,
            model_remapping={name: each.module for name, each in _FAMILIES.items()},
            model_class_name=family.classes[kind],
            # The default is one label, even if config.json names more.
            config_overrides={"num_labels": labels or 1},
            lazy=True,
        )
    require_fractions(network, directory)
    mend(network)
    if options.dtype is not None:
        cast_weights(network, options.dtype)
    DEVICE.prepare(
        network,
        keeps_type=rules_out_float32(options.dtype),
        dequantises=options.tuning.checkpoint.dequantize,
    )
    return network


def _towers_left_out(family: _Family) -> AbstractContextManager[None]:
    if not family.towers:
        return nullcontext()
    deciders = importlib.import_module("backend.model.deciders")
    left_out: AbstractContextManager[None] = deciders.without_towers(family.module, family.towers)
    return left_out


def _import_loader(directory: Path) -> ModuleType:
    try:
        return importlib.import_module("mlx_vlm.encoder_loader")
    except ImportError as error:
        raise UnsupportedModelError(
            f"{directory} is an encoder, and they are loaded with mlx-vlm, which cannot be "
            f"imported ({error}): {vision_command()}"
        ) from error


def _context_length(
    options: ModelOptions, directory: Path, family: _Family, config: Mapping[str, Any]
) -> int | None:
    """Return the trained context length or the requested one, limited by the positions."""
    positions = own_context_length(config)
    if family.length or family.longest:
        positions = int(_setting(config, family.length, family.longest or positions) or 0) or None
    if positions and family.counts_from_padding:
        positions -= int(config.get("pad_token_id", 1)) + 1
    path = directory / _SENTENCE_CONFIG
    trained = read_json(path, dict).get("max_seq_length") if path.is_file() else None
    if not isinstance(trained, int | float | None):
        raise LoadError(f"{path}: max_seq_length is not a number")
    wanted = options.max_model_len or trained
    if not wanted or (positions and wanted > positions):
        if options.max_model_len:
            log.warning("MaxModelLen %d exceeds the model's %d positions", wanted, positions)
        return positions
    return int(wanted)
