import mlx.core as mx
import numpy as np
import pytest

from backend.core.prompt import MediaKind, PreparedMedium
from backend.model.vision.media_processor import as_numpy

pytestmark = pytest.mark.mlx


def test_numbers_that_numpy_does_not_have_become_wider_ones():
    """Upstream contract: the processor of deepseekocr answers in bfloat16."""
    found = as_numpy(mx.array([0.5, 1.5], mx.bfloat16))
    assert (found.dtype, found.tolist()) == (np.float32, [0.5, 1.5])


def test_arrays_of_unlike_shape_stay_a_list():
    found = as_numpy([mx.ones((1, 2), mx.bfloat16), mx.zeros((3,))])
    assert [each.tolist() for each in found] == [[[1.0, 1.0]], [0.0, 0.0, 0.0]]


def test_lists_of_arrays_count_in_the_size_of_a_medium():
    """Upstream contract: the pixels of minicpmv4_6 are lists in lists."""
    pixels = [[np.zeros((2, 3), np.float32)], [np.zeros(5, np.int8)]]
    inputs = {"pixel_values": pixels, "grid": np.zeros(4, np.int64)}
    assert PreparedMedium(MediaKind.IMAGE, b"", "", (1,), inputs).nbytes == 24 + 5 + 32
