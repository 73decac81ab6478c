"""Jobs, their progress, and the states that end them; they travel between processes as JSON."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from common.shortening import shortened

COMPLETED, FAILED, STOPPED = "completed", "failed", "stopped"
EXPORT_FORMS = "lora", "merged_16bit", "merged_4bit"
FINAL_STATES = frozenset({COMPLETED, FAILED, STOPPED})


class _Job(Struct, frozen=True):
    @property
    def target_field(self) -> str:
        """The field of the request that names where the job writes."""
        return "output_dir"


class Quantization(_Job, frozen=True, tag=True, kw_only=True):
    """Write an MLX model with quantised weights.

    Attributes:
        model: A directory, or a hub id.
        models_dir: Where relative names are looked up; empty for none.
        name: Of the result, which becomes a directory of that name in `output_dir`.
        bits: Of a weight; `None` for what the mode or the recipe says.
        group_size: Weights that share a scale; `None` for the mode's default.
        mode: `affine`, `mxfp4`, `nvfp4` or `mxfp8`.
        recipe: A mixed recipe of mlx-lm, such as `mixed_4_6`; empty for none.
        is_checked: Whether to compare the result's perplexity with that of the source.
    """

    model: str
    models_dir: str
    output_dir: str
    name: str
    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    recipe: str = ""
    is_checked: bool = True

    @property
    def target(self) -> Path:
        """The directory that the result becomes."""
        return Path(self.output_dir) / self.name


class FineTuning(_Job, frozen=True, tag=True, kw_only=True):
    """Train an adapter, or all weights, on conversations or texts.

    Attributes:
        model: A directory, or a hub id.
        kind: `lora`, `dora` or `full`.
        rank: Of an adapter.
        alpha: An adapter's output is scaled by alpha over rank.
        targets: Names of the layers to adapt; empty for all linear ones.
        dataset: A file or a directory of JSONL, JSON, CSV or text.
        max_steps: Optimiser steps; 0 for what the epochs come to.
        save_steps: Between checkpoints; 0 for none but the last.
        resume_from: A checkpoint whose weights to begin with; empty for none.
        optimizer: `adam`, `adamw`, `sgd`, `adafactor` or `muon`.
        max_tokens: Longest sequence; longer ones lose their end.
        masks_prompt: Whether only the last reply of a conversation counts in the loss.
    """

    model: str
    models_dir: str
    output_dir: str
    dataset: str
    kind: str
    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    learning_rate: float
    epochs: int
    batch_size: int
    accumulation: int
    warmup_steps: int
    max_steps: int
    save_steps: int
    weight_decay: float
    checkpoints_gradients: bool
    optimizer: str
    seed: int
    resume_from: str
    max_tokens: int
    masks_prompt: bool

    @property
    def target(self) -> Path:
        """The directory that the checkpoints come into."""
        return Path(self.output_dir)


class Export(_Job, frozen=True, tag=True, kw_only=True):
    """Write a trained checkpoint in a form to load.

    Attributes:
        checkpoint: A directory that a fine-tuning wrote.
        form: One of `EXPORT_FORMS`: the adapter alone, or merged into its model.
        model: The model it was trained from; empty for the one that the checkpoint names.
    """

    checkpoint: str
    output_path: str
    form: str
    model: str
    models_dir: str

    @property
    def target(self) -> Path:
        """The directory that the result becomes."""
        return Path(self.output_path)

    @property
    def target_field(self) -> str:
        """The field of the request that names where the job writes."""
        return "output_path"


Job: TypeAlias = Quantization | FineTuning | Export


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a job is.

    Attributes:
        status: One of the host's words; those of `FINAL_STATES` are the last.
        percent: From 0 to 100.
        step: Optimiser steps so far.
        loss: Of the latest steps.
        eval_loss: Of the latest validation.
        eta_s: Seconds left, as it goes.
        path: Of the latest thing that was written: a checkpoint, or the result.
        metrics: Other figures, by name.
    """

    status: str
    message: str = ""
    percent: float = 0.0
    step: int = 0
    total_steps: int = 0
    epoch: float = 0.0
    total_epochs: float = 0.0
    loss: float = 0.0
    eval_loss: float = 0.0
    learning_rate: float = 0.0
    eta_s: float = 0.0
    path: str = ""
    metrics: dict[str, float] = {}

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self.status in FINAL_STATES

    def sendable(self) -> "Progress":
        """Return it without what JSON cannot hold, and with a message of a bounded length."""
        numbers = {
            name: 0.0
            for name in self.__struct_fields__
            if isinstance(value := getattr(self, name), float) and not isfinite(value)
        }
        metrics = {name: value for name, value in self.metrics.items() if isfinite(value)}
        message = shortened(self.message)
        return replace(self, message=message, metrics=metrics, **numbers)


Report: TypeAlias = Callable[[Progress], None]
"""Takes a job's progress."""
