"""Jobs, their progress and final states; they travel between processes as JSON."""

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


class _Job(Struct, frozen=True, kw_only=True):
    """Common to all jobs.

    Attributes:
        download_environment: Of the download of its model, which may need secrets; empty for that
            of the job.
    """

    download_environment: dict[str, str] = {}

    @property
    def target_field(self) -> str:
        """The request field that names the target."""
        return "output_dir"


class Quantization(_Job, frozen=True, tag=True, kw_only=True):
    """Write an MLX model with quantised weights.

    Attributes:
        model: A directory or a hub id.
        models_dir: Base directory of relative names; empty for none.
        name: Name of the result, which becomes a directory in `output_dir`.
        bits: Bits per weight; `None` uses the mode's or the recipe's.
        group_size: Weights that share a scale; `None` uses the mode's default.
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
        """Directory of the result."""
        return Path(self.output_dir) / self.name


class FineTuning(_Job, frozen=True, tag=True, kw_only=True):
    """Train an adapter, or all weights, on conversations or texts.

    Attributes:
        model: A directory or a hub id.
        kind: `lora`, `dora` or `full`.
        rank: Rank of an adapter.
        alpha: An adapter's output is scaled by alpha / rank.
        targets: Names of the layers to adapt; empty for all linear layers.
        dataset: A file or a directory of JSONL, JSON, CSV or text.
        max_steps: Optimiser steps; 0 derives them from the epochs.
        save_steps: Steps between checkpoints; 0 saves only the last.
        resume_from: Checkpoint to start from; empty for none.
        optimizer: `adam`, `adamw`, `sgd`, `adafactor` or `muon`.
        max_tokens: Length limit of a sequence; longer ones are truncated at the end.
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
        """Directory of the checkpoints."""
        return Path(self.output_dir)


class Export(_Job, frozen=True, tag=True, kw_only=True):
    """Export a trained checkpoint in a form that can be loaded.

    Attributes:
        checkpoint: Directory written by a fine-tuning job.
        form: One of `EXPORT_FORMS`: the adapter alone, or merged into its model.
        model: The base model; empty for the one named in the checkpoint.
    """

    checkpoint: str
    output_path: str
    form: str
    model: str
    models_dir: str

    @property
    def target(self) -> Path:
        """Directory of the result."""
        return Path(self.output_path)

    @property
    def target_field(self) -> str:
        """The request field that names the target."""
        return "output_path"


Job: TypeAlias = Quantization | FineTuning | Export


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a job.

    Attributes:
        status: One of the host's status words; those in `FINAL_STATES` are final.
        percent: From 0 to 100.
        step: Optimiser steps so far.
        loss: Loss of the latest steps.
        eval_loss: Loss of the latest validation.
        eta_s: Estimated seconds left.
        path: Path of the latest checkpoint, or of the result.
        metrics: Further figures, by name.
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
        """Whether this is the last progress."""
        return self.status in FINAL_STATES

    def sendable(self) -> "Progress":
        """Return a copy that JSON can encode, with a message of bounded length."""
        numbers = {
            name: 0.0
            for name in self.__struct_fields__
            if isinstance(value := getattr(self, name), float) and not isfinite(value)
        }
        metrics = {name: value for name, value in self.metrics.items() if isfinite(value)}
        message = shortened(self.message)
        return replace(self, message=message, metrics=metrics, **numbers)


Report: TypeAlias = Callable[[Progress], None]
"""Receives a job's progress."""
