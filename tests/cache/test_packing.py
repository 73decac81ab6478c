import mlx.core as mx
import pytest

from backend.cache.kv import Packing, group_size_for

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize(
    ("widths", "largest", "size"),
    [
        ([64], 64, 64),
        ([128], 64, 64),
        ([128], 128, 128),
        ([128], 32, 32),
        ([96], 128, 32),
        ([80], 128, None),
        ([16], 64, None),
        ([512, 64], 128, 64),
        ([512, 80], 64, None),
        ([128, 0], 64, None),
    ],
)
def test_a_group_divides_every_width(widths, largest, size):
    assert group_size_for(widths, largest) == size


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.05), (4, 0.6)])
def test_what_was_packed_comes_back_in_its_own_type_and_near(dtype, bits, bound):
    arrays = tuple(
        mx.random.normal((1, 2, 5, width), key=mx.random.key(width)).astype(dtype)
        for width in (64, 80, 96, 16)
    )
    packed = Packing(bits).pack(arrays)
    of_64, of_96 = (64 * bits // 32, 1, 1), (96 * bits // 32, 3, 3)
    assert [array.shape[-1] for array in packed] == [*of_64, 80, *of_96, 16]
    unpacked = Packing(bits).unpack(packed)
    for near, array in zip(unpacked, arrays, strict=True):
        assert near.dtype == array.dtype
        assert mx.max(mx.abs(near - array)).item() < bound
    assert mx.array_equal(unpacked[1], arrays[1]).item()


def test_without_bits_nothing_is_touched():
    words = (mx.zeros((1, 1, 3, 32), mx.uint32),)
    assert Packing().unpack(Packing().pack(words)) is words
