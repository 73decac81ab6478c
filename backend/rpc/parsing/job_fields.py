"""Requests for long jobs -> jobs, parsed once, strictly; gaps get the host's defaults."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from backend.config import (
    FINE_TUNING,
    MAX_ADAPTER_RANK,
    MAX_REQUEST_ID_CHARS,
    MAX_TARGET_MODULES,
)
from backend.errors import InvalidRequestError
from backend.jobs.job import EXPORT_FORMS, Export, FineTuning, Quantization
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.checks import (
    Range,
    require_at_most,
    require_path,
    require_printable,
    require_range,
    require_truth,
)

BITS = (2, 3, 4, 5, 6, 8)
MODES = ("mxfp4", "mxfp8", "nvfp4")
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
KINDS = ("lora", "dora", "full")
OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "muon")

# q4, int4, 4bit, 4-bit, and llama.cpp's names such as q4_k_m, of which only the number counts here.
_BITS = re.compile(r"(?:q|int)?(\d)(?:[-_]?bits?|(?:_[k01])(?:_[sml])?)?")
_CHECK, _GROUP_SIZE = "check", "group_size"
_MASK_PROMPT, _MAX_TOKENS = "mask_prompt", "max_seq_length"
_WARMUP, _WEIGHT_DECAY = "warmup_steps", "weight_decay"
_MAX_DIGITS = 9
_MAX_TOLD = 8

log = logging.getLogger(__name__)


def quantization(request: pb.QuantizationRequest, models_dir: str) -> Quantization:
    """Return the requested quantisation."""
    model = required_path("model", request.model)
    kind = request.quantization_type.strip().lower() or "q4"
    extra = _extra_options(request, _CHECK, _GROUP_SIZE)
    return Quantization(
        model=model,
        models_dir=models_dir,
        output_dir=_target("output_dir", request.output_dir),
        name=f"{Path(model).name}-{kind}",
        bits=_bits(kind),
        group_size=_number(extra, _GROUP_SIZE) or None,
        mode=kind if kind in MODES else "affine",
        recipe=kind if kind in RECIPES else "",
        is_checked=_truth(extra, _CHECK, default=True),
    )


def fine_tuning(request: pb.FineTuneRequest, models_dir: str) -> FineTuning:
    """Return the requested training."""
    method = request.training_method or "sft"
    if method != "sft":
        problem = f"{method!r} is not offered; mlx-lm trains by supervised fine-tuning (sft)"
        raise InvalidRequestError("training_method", problem)
    if request.dataset_split not in ("", "train"):
        problem = f"{request.dataset_split!r}: only the split 'train' of a dataset is trained on"
        raise InvalidRequestError("dataset_split", problem)
    extra = _extra_options(request, _MASK_PROMPT, _MAX_TOKENS, _WARMUP, _WEIGHT_DECAY)
    learning_rate = require_range("learning_rate", request.learning_rate, Range(0, 1))
    return FineTuning(
        model=required_path("model", request.model),
        models_dir=models_dir,
        output_dir=_target("output_dir", request.output_dir),
        dataset=required_path("dataset_source", request.dataset_source),
        kind=_one_of("training_type", request.training_type or KINDS[0], KINDS),
        rank=_rank(request.adapter_rank),
        alpha=_positive("adapter_alpha", request.adapter_alpha, FINE_TUNING.alpha),
        dropout=_share("adapter_dropout", request.adapter_dropout),
        targets=_targets(request.target_modules),
        learning_rate=learning_rate or FINE_TUNING.learning_rate,
        epochs=_positive("num_epochs", request.num_epochs, FINE_TUNING.epochs),
        batch_size=_positive("batch_size", request.batch_size, FINE_TUNING.batch_size),
        accumulation=_positive(
            "gradient_accumulation_steps",
            request.gradient_accumulation_steps,
            FINE_TUNING.accumulation,
        ),
        warmup_steps=_warmup(request),
        max_steps=_positive("max_steps", request.max_steps, 0),
        save_steps=_positive("save_steps", request.save_steps, 0),
        weight_decay=_weight_decay(request),
        checkpoints_gradients=request.gradient_checkpointing,
        optimizer=_optimizer(request.optimizer),
        seed=request.seed or FINE_TUNING.seed,
        resume_from=require_path("resume_from_checkpoint", request.resume_from_checkpoint),
        max_tokens=_number(extra, _MAX_TOKENS) or FINE_TUNING.max_tokens,
        masks_prompt=_truth(extra, _MASK_PROMPT, default=False),
    )


def model_export(request: pb.ExportModelRequest, models_dir: str) -> Export:
    """Return the requested export."""
    form = request.export_format or EXPORT_FORMS[0]
    return Export(
        checkpoint=required_path("checkpoint_path", request.checkpoint_path),
        output_path=_target("output_path", request.output_path),
        form=_one_of("export_format", form, EXPORT_FORMS),
        model=require_path("model", request.model),
        models_dir=models_dir,
    )


def job_id(text: str) -> str:
    """Return a job's id; if it is empty, the backend chooses one."""
    return require_printable("job_id", text, MAX_REQUEST_ID_CHARS)


def _extra_options(
    request: pb.QuantizationRequest | pb.FineTuneRequest, *known: str
) -> Mapping[str, str]:
    """Return the extra options; the log names those that mean nothing here, not their values."""
    extra = request.extra_options
    for name in sorted(extra.keys() - {*known})[:_MAX_TOLD]:
        log.warning("extra_options[%r] is ignored; known are %s", name[:32], ", ".join(known))
    return extra


def _bits(kind: str) -> int | None:
    if kind in MODES or kind in RECIPES:
        return None
    match = _BITS.fullmatch(kind)
    if match is None or int(match[1]) not in BITS:
        known = ", ".join((*(f"q{bits}" for bits in BITS), *MODES, *RECIPES))
        raise InvalidRequestError("quantization_type", f"{kind!r} is not one of {known}")
    return int(match[1])


def _optimizer(name: str) -> str:
    """Return mlx-lm's optimiser for a name of the host, such as `adamw_torch` or `adamw_8bit`."""
    wanted = name.strip().lower() or OPTIMIZERS[0]
    for known in OPTIMIZERS:
        if wanted == known or wanted.startswith(f"{known}_"):
            return known
    raise InvalidRequestError("optimizer", f"{name!r} is not one of {', '.join(OPTIMIZERS)}")


def required_path(field: str, text: str) -> str:
    """Return a path, which must be given."""
    if not text.strip():
        raise InvalidRequestError(field, "is empty")
    return require_path(field, text)


def _target(field: str, text: str) -> str:
    """Return where a job writes: in the host's working directory nobody would look for it."""
    path = required_path(field, text)
    if not Path(path).is_absolute():
        raise InvalidRequestError(field, f"must be an absolute path, not {path!r}")
    return path


def _one_of(field: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise InvalidRequestError(field, f"{value!r} is not one of {', '.join(known)}")
    return value


def _positive(field: str, value: int, default: int) -> int:
    return require_range(field, value, Range(0)) or default


def _rank(rank: int) -> int:
    return require_range("adapter_rank", rank, Range(0, MAX_ADAPTER_RANK)) or FINE_TUNING.rank


def _targets(names: Sequence[str]) -> tuple[str, ...]:
    require_at_most("target_modules", names, MAX_TARGET_MODULES)
    return tuple(
        require_printable(f"target_modules[{i}]", name, MAX_REQUEST_ID_CHARS)
        for i, name in enumerate(names)
    )


def _warmup(request: pb.FineTuneRequest) -> int:
    """Return the steps of the warm-up; in `extra_options` 0 means 0."""
    if _WARMUP in request.extra_options:
        return _number(request.extra_options, _WARMUP)
    return _positive(_WARMUP, request.warmup_steps, FINE_TUNING.warmup_steps)


def _weight_decay(request: pb.FineTuneRequest) -> float:
    """Return the decay; 0 is the host's default, and `none` in `extra_options` is none."""
    if request.extra_options.get(_WEIGHT_DECAY, "").strip().lower() in ("0", "0.0", "none"):
        return 0.0
    return _share(_WEIGHT_DECAY, request.weight_decay) or FINE_TUNING.weight_decay


def _share(field: str, value: float) -> float:
    if not 0.0 <= value < 1.0:
        raise InvalidRequestError(field, f"must be at least 0 and below 1, not {value:g}")
    return value


def _number(extra: Mapping[str, str], key: str) -> int:
    text = extra.get(key, "").strip() or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise InvalidRequestError(f'extra_options["{key}"]', f"must be a number, not {text!r}")
    return int(text)


def _truth(extra: Mapping[str, str], key: str, *, default: bool) -> bool:
    text = extra.get(key, "")
    return require_truth(f'extra_options["{key}"]', text) if text else default
