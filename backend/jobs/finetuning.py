"""Fine-tunes a model with mlx-lm's trainer; every checkpoint is an adapter for LoadModel."""

import csv
import io
import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from jinja2 import TemplateError
from mlx.utils import tree_flatten
from mlx_lm.lora import CONFIG_DEFAULTS, train_model
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import create_dataset
from mlx_lm.utils import load
from msgspec.structs import replace

from backend.config import JOB_REPORT_INTERVAL_S
from backend.errors import InvalidRequestError
from backend.jobs.job import COMPLETED, STOPPED, FineTuning, Progress, Report
from backend.jobs.scratch import (
    CONFIG,
    WEIGHTS,
    Checkpoint,
    checkpoint_path,
    find_model,
    is_checkpoint,
    leftovers,
    list_checkpoints,
    refusals_of_disk,
    require_apart,
    require_checkpoint,
    scratch,
    write_state,
    written_whole,
)
from backend.model.checkpoint.failures import UPSTREAM_FAILURES
from backend.model.device import DEVICE
from backend.model.text.tokenizer_file import follow_wrapped


class Row(dict[str, Any]):
    """A row of a dataset, with its place for errors."""

    def __init__(self, place: str, **values: Any) -> None:  # noqa: ANN401 (any JSON value)
        super().__init__(values)
        self.place = place


# Every tenth row is used for validation if the dataset has no validation part.
_VALIDATION_STRIDE = 10
_SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows of one form: `messages`, `prompt` and `completion`, or `text`."""

    train: Sequence[Row]
    validation: Sequence[Row]


def read_dataset(source: str) -> Dataset:
    """Read a file, or a directory with `train` and perhaps `valid` files.

    Rows may be conversations (`messages`, or ShareGPT's `conversations`), `prompt` and
    `completion`, Alpaca's `instruction`, `input` and `output`, or `text`.
    """
    path = Path(source)
    if path.is_dir():
        # Of several with one stem the first counts.
        parts = {file.stem: file for file in sorted(_files(path), reverse=True)}
        if "train" not in parts:
            raise _refusal(f"{source!r} holds no train.jsonl")
        train = _rows(parts["train"])
        for stem in ("valid", "validation", "test"):
            if stem in parts:
                return Dataset(train, _rows(parts[stem]))
    elif path.is_file():
        train = _rows(path)
    else:
        raise _refusal(f"there is no file or directory {source!r}")
    return _split(train)


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError("dataset_source", problem)


def _split(rows: Sequence[Row]) -> Dataset:
    if len(rows) < _VALIDATION_STRIDE:
        return Dataset(rows, ())
    held_out = rows[_VALIDATION_STRIDE - 1 :: _VALIDATION_STRIDE]
    train = [row for number, row in enumerate(rows, 1) if number % _VALIDATION_STRIDE]
    return Dataset(train, held_out)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in path.iterdir() if file.suffix in _READERS and file.is_file())


def _rows(path: Path) -> list[Row]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        kinds = ", ".join(_READERS)
        raise _refusal(f"{path.name} has an unsupported format: use one of ({kinds})")
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(f"{path.name}: {error}") from error
    rows = [_row(value, f"{path.name}, row {n}") for n, value in enumerate(reader(text), 1)]
    if not rows:
        raise _refusal(f"{path.name} has no rows")
    if len({frozenset(row) - {"tools"} for row in rows}) > 1:
        raise _refusal(f"{path.name} has rows of several forms")
    return rows


def _lines(text: str) -> Iterator[Any]:
    # `splitlines` would also split at characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _json(line, f"line {number}")


def _array(text: str) -> Iterable[Any]:
    value = _json(text, "the file")
    if not isinstance(value, list):
        raise _refusal("the file is not a JSON array")
    return value


def _json(text: str, place: str) -> Any:  # noqa: ANN401 (any JSON value)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"{place} is not valid JSON: {error}") from error


def _table(text: str) -> Iterator[Any]:
    try:
        yield from csv.DictReader(io.StringIO(text, newline=""))
    except csv.Error as error:
        raise _refusal(f"the table is malformed: {error}") from error


def _paragraphs(text: str) -> Iterator[Any]:
    return ({"text": part.strip()} for part in text.split("\n\n") if part.strip())


_READERS = {".jsonl": _lines, ".json": _array, ".csv": _table, ".txt": _paragraphs}


def _row(value: Any, place: str) -> Row:  # noqa: ANN401 (any JSON value)
    match value:
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            tools = {"tools": value["tools"]} if value.get("tools") else {}
            return Row(place, messages=messages, **tools)
        case {"conversations": [*turns]} if turns and all(map(_is_turn, turns)):
            spoken = [{"role": _SPEAKERS[t["from"]], "content": t["value"]} for t in turns]
            return Row(place, messages=spoken)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Row(place, prompt=prompt, completion=completion)
        case {"instruction": str(instruction), "output": str(output)}:
            extra = value.get("input") or ""
            prompt = f"{instruction}\n\n{extra}" if extra else instruction
            return Row(place, prompt=prompt, completion=output)
        case {"text": str(text)} if text.strip():
            return Row(place, text=text)
    raise _refusal(
        f"{place} has neither messages, nor prompt and completion, nor instruction and output, "
        "nor text"
    )


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _is_turn(value: object) -> bool:
    match value:
        case {"from": str(speaker), "value": str()}:
            return speaker in _SPEAKERS
    return False


_ROW_FAILURES: tuple[type[BaseException], ...] = (*UPSTREAM_FAILURES, TemplateError)


class _NamedRows:
    """A dataset of mlx-lm, whose errors name the row that its template or tokenizer refuses."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401 - mlx-lm has no common class
        self._dataset = dataset

    def __getitem__(self, index: int) -> Row:
        row: Row = self._dataset[index]
        return row

    def __len__(self) -> int:
        return len(self._dataset)

    def process(self, row: Row) -> Any:  # noqa: ANN401 - mlx-lm's
        """Return the tokens of a row, and where those that count begin."""
        try:
            return self._dataset.process(row)
        except _ROW_FAILURES as error:
            problem = f"{row.place} does not suit the model: {type(error).__name__}: {error}"
            raise _refusal(problem) from error


_VALIDATION_BATCHES = 25
_VALIDATIONS = 50


class _StoppedError(Exception):
    """The caller stopped the training."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a training takes.

    Attributes:
        batch_size: Rows per pass.
        passes_per_epoch: Passes to see every row once.
        total_steps: Optimiser steps, including those before a resumed checkpoint.
        done_steps: Steps of the checkpoint that it resumes from.
        accumulation: Passes per step.
    """

    batch_size: int
    passes_per_epoch: int
    total_steps: int
    done_steps: int
    accumulation: int

    @property
    def passes(self) -> int:
        """Passes left to run."""
        return (self.total_steps - self.done_steps) * self.accumulation

    def step_of(self, passes: int) -> int:
        """Return the step reached after a number of passes."""
        return self.done_steps + passes // self.accumulation

    def epoch_of(self, passes: int) -> float:
        """Return the epochs completed after a number of passes."""
        return (self.done_steps * self.accumulation + passes) / self.passes_per_epoch


def schedule_of(job: FineTuning, rows: int, done_steps: int) -> Schedule:
    """Return the schedule of a job for a number of rows."""
    batch_size = min(job.batch_size, rows)
    passes_per_epoch = rows // batch_size
    whole = math.ceil(job.epochs * passes_per_epoch / job.accumulation)
    total_steps = job.max_steps or max(whole, 1)
    if done_steps >= total_steps:
        raise InvalidRequestError(
            "resume_from_checkpoint", f"step {done_steps} of {total_steps} leaves nothing to train"
        )
    return Schedule(batch_size, passes_per_epoch, total_steps, done_steps, job.accumulation)


def fine_tune(job: FineTuning, report: Report, stopping: threading.Event) -> Progress:
    """Train, and return the final progress.

    Args:
        report: Receives the progress, from the start.
        stopping: When set, the training ends early with a checkpoint of the latest weights.
    """
    place = job.target / ".training"
    note = _cut_off(job.target) if leftovers(place) and not job.resume_from else ""
    if note:
        log.warning("%s", note)
    report(Progress(status="loading_dataset", message=job.dataset))
    dataset = read_dataset(job.dataset)
    resumed = (
        require_checkpoint("resume_from_checkpoint", job.resume_from) if job.resume_from else None
    )
    schedule = schedule_of(job, len(dataset.train), resumed.step if resumed else 0)
    report(Progress(status="loading_model", message=job.model))
    source = find_model(job.model, job)
    require_apart(job.target_field, job.target, source)
    model, tokenizer = load(str(source), lazy=True)
    follow_wrapped(tokenizer, source)
    types = {name: weight.dtype for name, weight in tree_flatten(model.parameters())}
    DEVICE.prepare_training(model)
    mx.eval(model.parameters())
    with ExitStack() as stack:
        if schedule.passes < DEVICE.compiles_from:
            mx.disable_compile()
            stack.callback(mx.enable_compile)
        try:
            work = stack.enter_context(scratch(place))
        except OSError as error:
            problem = f"{job.target}: {error.strerror or error}"
            raise InvalidRequestError(job.target_field, problem) from error
        stack.enter_context(refusals_of_disk(job.target_field, job.target, place))
        begun = Progress(status="training", message=note)
        training = _Training(job, schedule, model, types, source, report, stopping, work, begun)
        return training.run(dataset, tokenizer, resumed)


def _cut_off(output_dir: Path) -> str:
    """Return the message for a training whose process died, and where it can resume."""
    checkpoints = list_checkpoints(output_dir)
    if not checkpoints:
        return f"an earlier training in {output_dir} was cut off before its first checkpoint"
    last = checkpoints[-1]
    return (
        f"an earlier training in {output_dir} was cut off after step {last.step}; "
        f"resume_from_checkpoint {last.path} continues from there"
    )


@dataclass(eq=False)
class _Training(TrainingCallback):  # type: ignore[misc]  # mlx-lm is untyped
    """One training; mlx-lm's loop calls it back."""

    job: FineTuning
    schedule: Schedule
    model: nn.Module
    types: Mapping[str, mx.Dtype]  # of the checkpoint's weights
    source: Path
    report: Report
    stopping: threading.Event
    work: Path
    progress: Progress
    _began_at: float = field(default_factory=time.monotonic)
    _told_at: float = 0.0
    _saved_step: int = 0

    def run(self, dataset: Dataset, tokenizer: Any, resumed: Checkpoint | None) -> Progress:  # noqa: ANN401
        self._saved_step = self.schedule.done_steps
        train, validation = self._parts(dataset, tokenizer)
        ended = {"status": COMPLETED, "percent": 100.0}
        try:
            train_model(self._settings(resumed), self.model, train, validation, self)
        except _StoppedError:
            ended = {"status": STOPPED, "message": f"stopped at step {self.progress.step}"}
        except ValueError as error:
            raise InvalidRequestError("FineTuneRequest", str(error)) from error
        self._save()
        return self._with(**ended)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Record the progress of a step, save if due, and stop if requested."""
        self._note(train_info)
        step = self.progress.step
        is_last = step == self.schedule.total_steps
        if self.job.save_steps and step >= self._saved_step + self.job.save_steps and not is_last:
            self._save()
        now = time.monotonic()
        if is_last or now >= self._told_at + JOB_REPORT_INTERVAL_S:
            self._told_at = now
            self.report(self.progress)
        if self.stopping.is_set():
            raise _StoppedError

    def _note(self, train_info: dict[str, Any]) -> None:
        passes = train_info["iteration"]
        step = self.schedule.step_of(passes)
        share = passes / self.schedule.passes
        elapsed_s = time.monotonic() - self._began_at
        self._with(
            status="training",
            step=step,
            total_steps=self.schedule.total_steps,
            epoch=self.schedule.epoch_of(passes),
            total_epochs=self.schedule.epoch_of(self.schedule.passes),
            loss=float(train_info["train_loss"]),
            learning_rate=float(train_info["learning_rate"]),
            percent=100.0 * step / self.schedule.total_steps,
            eta_s=elapsed_s * (1.0 - share) / share,
            metrics={
                "tokens_per_second": float(train_info["tokens_per_second"]),
                "trained_tokens": float(train_info["trained_tokens"]),
                "peak_memory_gb": float(train_info["peak_memory"]),
            },
        )

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        now = self._with(eval_loss=float(val_info["val_loss"]))
        text = "step %d of %d: loss %.4g on rows held out"
        log.info(text, now.step, self.schedule.total_steps, now.eval_loss)

    def _with(self, **changes: Any) -> Progress:  # noqa: ANN401 (fields of a struct)
        self.progress = replace(self.progress, **changes)
        return self.progress

    def _parts(self, dataset: Dataset, tokenizer: Any) -> tuple[Any, Any]:  # noqa: ANN401
        config = SimpleNamespace(mask_prompt=self.job.masks_prompt)
        size = self.schedule.batch_size
        if self.job.masks_prompt and "text" in dataset.train[0]:
            problem = "needs rows with prompts, and these are plain text"
            raise InvalidRequestError('extra_options["mask_prompt"]', problem)
        held_out = dataset.validation if len(dataset.validation) >= size else ()

        def part(rows: Sequence[Row]) -> Any:  # noqa: ANN401 - mlx-lm's
            return _NamedRows(create_dataset(list(rows), tokenizer, config)) if rows else []

        return part(dataset.train), part(held_out)

    def _settings(self, resumed: Checkpoint | None) -> SimpleNamespace:
        """Return the settings for mlx-lm's trainer, which saves them next to the weights."""
        job, schedule = self.job, self.schedule
        share_left = 1.0 - schedule.done_steps / schedule.total_steps
        rate = job.learning_rate * share_left
        warmup = 0 if resumed else min(job.warmup_steps, schedule.total_steps // 10)
        steps = max(schedule.total_steps - schedule.done_steps - warmup, 1)
        decay = {} if job.optimizer == "adam" else {"weight_decay": job.weight_decay}
        settings = {
            "model": str(self.source),
            "data": job.dataset,
            "fine_tune_type": job.kind,
            "num_layers": len(self.model.layers),
            "lora_parameters": self._lora_parameters(),
            "optimizer": job.optimizer,
            "optimizer_config": {job.optimizer: decay},
            "learning_rate": rate,
            "lr_schedule": {
                "name": "linear_schedule",
                "arguments": [rate, 0.0, steps],
                "warmup": warmup,
            },
            "seed": job.seed,
            "batch_size": schedule.batch_size,
            "iters": schedule.passes,
            "val_batches": _VALIDATION_BATCHES,
            "steps_per_report": job.accumulation,
            "steps_per_eval": max(schedule.passes_per_epoch, schedule.passes // _VALIDATIONS),
            # This module writes the checkpoints, so the trainer must not.
            "save_every": schedule.passes + 1,
            "adapter_path": str(self.work),
            "resume_adapter_file": str(resumed.path / WEIGHTS) if resumed else None,
            "max_seq_length": job.max_tokens,
            "grad_checkpoint": job.checkpoints_gradients,
            "grad_accumulation_steps": job.accumulation,
        }
        return SimpleNamespace(**{**CONFIG_DEFAULTS, **settings})

    def _lora_parameters(self) -> dict[str, Any]:
        job = self.job
        parameters = {"rank": job.rank, "scale": job.alpha / job.rank, "dropout": job.dropout}
        if not job.targets or job.kind == "full":
            return parameters
        paths = {path for layer in self.model.layers for path, _ in layer.named_modules() if path}
        keys = sorted(path for path in paths if path.rpartition(".")[2] in job.targets)
        known = {path.rpartition(".")[2] for path in keys}
        if missing := set(job.targets) - known:
            raise InvalidRequestError(
                "target_modules",
                f"the model's layers have no {min(missing)!r}; they have "
                f"{', '.join(sorted({path.rpartition('.')[2] for path in paths}))}",
            )
        return {**parameters, "keys": keys}

    def _save(self) -> None:
        """Write a checkpoint of the current weights, unless this step has one."""
        step = self.progress.step
        if step <= self._saved_step:
            return
        target = checkpoint_path(self.job.target, step)
        self.report(self._with(status="saving"))
        output = self.job.target_field
        with written_whole(output, target, may_replace=is_checkpoint) as partial:
            partial.mkdir()
            weights = {
                name: weight.astype(self.types.get(name, weight.dtype))
                for name, weight in tree_flatten(self.model.trainable_parameters())
            }
            mx.save_safetensors(str(partial / WEIGHTS), weights)
            settings = json.loads((self.work / CONFIG).read_text(encoding="utf-8"))
            settings["adapter_path"] = "."
            (partial / CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
            write_state(partial, step, self.progress.epoch, self.progress.loss)
        self._saved_step = step
        self._with(status="training", path=str(target))
