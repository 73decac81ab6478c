"""Datasets for fine-tuning: reads files of the common forms into rows for mlx-lm's trainer."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from backend.errors import InvalidRequestError

Row: TypeAlias = Mapping[str, Any]

# Every tenth row is used for validation if the dataset has no validation part.
_VALIDATION_STRIDE = 10
_SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows of one form: `messages`, `prompt` and `completion`, or `text`."""

    train: Sequence[Row]
    validation: Sequence[Row]


def read_dataset(source: str) -> Dataset:
    """Read a file, or a directory with `train` and perhaps `valid` files.

    Rows may be conversations (`messages`, or ShareGPT's `conversations`), `prompt` and
    `completion`, Alpaca's `instruction`, `input` and `output`, or `text`.

    Raises:
        InvalidRequestError: A file is missing, or a row is malformed; the message gives its number.
    """
    path = Path(source)
    if path.is_dir():
        train = _rows(_part(path, ("train",), source))
        for stem in ("valid", "validation", "test"):
            if held_out := [file for file in _files(path) if file.stem == stem]:
                return Dataset(train, _rows(held_out[0]))
    elif path.is_file():
        train = _rows(path)
    else:
        raise InvalidRequestError("dataset_source", f"there is no file or directory {source!r}")
    return _split(train)


def _split(rows: Sequence[Row]) -> Dataset:
    if len(rows) < _VALIDATION_STRIDE:
        return Dataset(rows, ())
    held_out = rows[_VALIDATION_STRIDE - 1 :: _VALIDATION_STRIDE]
    train = [row for number, row in enumerate(rows, 1) if number % _VALIDATION_STRIDE]
    return Dataset(train, held_out)


def _part(path: Path, stems: Sequence[str], source: str) -> Path:
    found = [file for file in _files(path) if file.stem in stems]
    if not found:
        raise InvalidRequestError("dataset_source", f"{source!r} holds no train.jsonl")
    return found[0]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in _READERS and file.is_file())


def _rows(path: Path) -> list[Row]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        kinds = ", ".join(_READERS)
        problem = f"{path.name} has an unsupported format: use one of ({kinds})"
        raise InvalidRequestError("dataset_source", problem)
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("dataset_source", f"{path.name}: {error}") from error
    rows = [_row(value, f"{path.name}, row {n}") for n, value in enumerate(reader(text), 1)]
    if not rows:
        raise InvalidRequestError("dataset_source", f"{path.name} has no rows")
    if len({frozenset(row) - {"tools"} for row in rows}) > 1:
        raise InvalidRequestError("dataset_source", f"{path.name} has rows of several forms")
    return rows


def _lines(text: str) -> Iterator[Any]:
    # `splitlines` would also split at characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _json(line, f"line {number}")


def _array(text: str) -> Iterable[Any]:
    value = _json(text, "the file")
    if not isinstance(value, list):
        raise InvalidRequestError("dataset_source", "the file is not a JSON array")
    return value


def _json(text: str, place: str) -> Any:  # noqa: ANN401 (any JSON value)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            "dataset_source", f"{place} is not valid JSON: {error}"
        ) from error


def _table(text: str) -> Iterator[Any]:
    try:
        yield from csv.DictReader(io.StringIO(text, newline=""))
    except csv.Error as error:
        raise InvalidRequestError("dataset_source", f"the table is malformed: {error}") from error


def _paragraphs(text: str) -> Iterator[Any]:
    return ({"text": part.strip()} for part in text.split("\n\n") if part.strip())


_READERS = {".jsonl": _lines, ".json": _array, ".csv": _table, ".txt": _paragraphs}


def _row(value: Any, place: str) -> Row:  # noqa: ANN401 (any JSON value)
    """Return a row in one of mlx-lm's forms."""
    match value:
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            tools = {"tools": value["tools"]} if value.get("tools") else {}
            return {"messages": messages, **tools}
        case {"conversations": [*turns]} if turns and all(map(_is_turn, turns)):
            return {
                "messages": [
                    {"role": _SPEAKERS[turn["from"]], "content": turn["value"]} for turn in turns
                ]
            }
        case {"prompt": str(), "completion": str()}:
            return {"prompt": value["prompt"], "completion": value["completion"]}
        case {"instruction": str(instruction), "output": str(output)}:
            extra = value.get("input") or ""
            prompt = f"{instruction}\n\n{extra}" if extra else instruction
            return {"prompt": prompt, "completion": output}
        case {"text": str(text)} if text.strip():
            return {"text": text}
    raise InvalidRequestError(
        "dataset_source",
        f"{place} has neither messages, nor prompt and completion, nor instruction and output, "
        "nor text",
    )


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _is_turn(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("from"), str)
        and value["from"] in _SPEAKERS
        and isinstance(value.get("value"), str)
    )
