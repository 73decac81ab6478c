"""A GGUF file as values: its metadata, and its tensors in float32."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Types of entries in a GGUF vocabulary.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


@dataclass(frozen=True)
class Source:
    """The content of a GGUF file; tensors by llama.cpp's names, with rows first."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def of(self, key: str) -> Any:  # noqa: ANN401 (as the key says)
        """Return a value of the model's architecture, whose name leads its key."""
        return self.metadata[f"{self.metadata['general.architecture']}.{key}"]

    def vocabulary(self, key: str) -> Any:  # noqa: ANN401
        """Return a value of the vocabulary."""
        return self.metadata[f"tokenizer.ggml.{key}"]

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Those that `tokenizer.json` lists apart from its model, with their ids."""
        pairs = enumerate(
            zip(self.vocabulary("tokens"), self.vocabulary("token_type"), strict=True)
        )
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": text, **plain, "special": kind == CONTROL}
            for index, (text, kind) in pairs
            if kind in (CONTROL, USER_DEFINED)
        ]


def read(path: Path, packages: Path) -> Source:
    """Read a whole file, with the package `gguf` of that folder."""
    _have_gguf(packages)
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    tensors = {one.name: dequantize(one.data, one.tensor_type) for one in reader.tensors}
    return Source(
        {name: field.contents() for name, field in reader.fields.items()},
        {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()},
    )


def write(source: Source, path: Path, packages: Path) -> None:
    """Write a GGUF file; its numbers get the types that llama.cpp's own files have."""
    _have_gguf(packages)
    from gguf import GGUFWriter

    values = dict(source.metadata)
    writer = GGUFWriter(path, values.pop("general.architecture"))
    adding = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        if not key.startswith("GGUF.") and key != "general.file_type":
            adding[type(value)](key, value)
    for name, tensor in source.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _have_gguf(packages: Path) -> None:
    if str(packages) not in sys.path:
        sys.path.append(str(packages))  # last: NumPy and the rest are this environment's
