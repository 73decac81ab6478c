"""Keys and values on disk are read by models that compute the same ones, and by no others."""

import mlx.core as mx
import pytest
from mlx import nn

from backend.config import ModelOptions
from backend.model.checkpoint.gate import fingerprint
from backend.model.checkpoint.weights import weight_types

pytestmark = pytest.mark.mlx

OPTIONS = ModelOptions(model="tiny")


def test_a_model_that_a_cpu_computes_in_another_type_reads_none_of_them(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    layer = nn.QuantizedLinear(64, 64)
    wide = weight_types(layer)
    layer.set_dtype(mx.bfloat16)
    narrow = weight_types(layer)
    names = [fingerprint(OPTIONS, tmp_path, types) for types in (wide, narrow, wide)]
    assert names[0] == names[2] != names[1]


def test_a_changed_file_is_another_model_and_a_link_to_nothing_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    before = fingerprint(OPTIONS, tmp_path, [])
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert fingerprint(OPTIONS, tmp_path, []) != before
