import mlx.core as mx
import numpy as np
import pytest

from backend.model.vision.processor_call import as_numpy

pytestmark = pytest.mark.mlx


def test_numbers_that_numpy_does_not_have_become_wider_ones():
    """Upstream contract: the processor of deepseekocr answers in bfloat16."""
    found = as_numpy(mx.array([0.5, 1.5], mx.bfloat16))
    assert (found.dtype, found.tolist()) == (np.float32, [0.5, 1.5])


def test_arrays_of_unlike_shape_stay_a_list():
    found = as_numpy([mx.ones((1, 2), mx.bfloat16), mx.zeros((3,))])
    assert [each.tolist() for each in found] == [[[1.0, 1.0]], [0.0, 0.0, 0.0]]
