"""A few tokens meet quantised weights in a kernel, which is compiled for the machine."""

import os
import subprocess

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from backend.cpu.products import prepare_products
from backend.cpu.quantised_products import (
    MOST_TOKENS,
    is_available,
    load_kernel,
    multiply,
)

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(not is_available(), reason="there is no C compiler"),
    pytest.mark.usefixtures("openblas"),
]

KNOWN = [(4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]
WIDTH, OUTPUTS = 512, 90


def layer(bits=4, group_size=64, *, mode="affine", dtype=mx.float32, outputs=OUTPUTS):
    mx.random.seed(bits + group_size)
    made = nn.Linear(WIDTH, outputs).to_quantized(group_size=group_size, bits=bits, mode=mode)
    made.set_dtype(dtype)
    return made


def inputs(*shape):
    return mx.random.normal((*shape, WIDTH))


def close(found, expected):
    return np.allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "group_size"), KNOWN)
def test_products_are_those_of_mlx_for_any_few_tokens(bits, group_size):
    made = layer(bits, group_size)
    for tokens in range(1, MOST_TOKENS + 1):
        given = inputs(tokens)
        expected = mx.quantized_matmul(
            given, made.weight, made.scales, made.biases, True, group_size, bits
        )
        assert close(multiply(made, given), expected)


def test_a_token_has_the_same_product_alone_and_in_company():
    made, given = layer(), inputs(3, 5)
    together = multiply(made, given)
    assert together.shape == (3, 5, OUTPUTS)
    for row in range(3):
        for token in range(5):
            alone = multiply(made, given[row, token][None])
            assert mx.array_equal(alone[0], together[row, token])


def test_inputs_and_weights_that_are_exchanged_are_not_those_of_the_product_before():
    made, given = layer(), inputs(2)
    first = np.asarray(multiply(made, given))
    given += 1.0
    assert close(multiply(made, given), first + np.asarray(multiply(made, mx.ones((2, WIDTH)))))
    made.scales, made.biases = 2.0 * made.scales, 2.0 * made.biases
    assert close(multiply(made, given - 1.0), 2.0 * first)


def test_weights_that_are_a_part_of_others_are_read_where_they_are():
    whole, made = layer(), layer()
    half = slice(WIDTH // 2, None)
    made.weight, made.scales, made.biases = (
        array[:, array.shape[1] // 2 :] for array in (whole.weight, whole.scales, whole.biases)
    )
    padded = mx.zeros((3, WIDTH))
    given = padded[:, half] = inputs(3)[:, half]
    assert close(multiply(made, given), multiply(whole, padded))


def test_large_matrices_are_shared_among_threads_without_a_difference():
    made = layer(outputs=2**15)
    given = inputs(2)
    parts = [multiply(part, given) for part in (made, layer(outputs=2**15))]
    expected = mx.quantized_matmul(given, made.weight, made.scales, made.biases, True, 64, 4)
    assert mx.array_equal(*parts)
    assert close(parts[0], expected)


@pytest.mark.parametrize(
    "made",
    [
        layer(2),
        layer(6),
        layer(4, 32),
        layer(4, 32, mode="mxfp4"),
        layer(dtype=mx.bfloat16),
    ],
)
def test_other_forms_are_left_to_mlx(made):
    assert multiply(made, inputs(1)) is None


def stating(*, bits=4, group_size=64, scaled=WIDTH):
    """Return a layer of 4 bits in groups of 64 that states these."""
    made = layer()
    made.bits, made.group_size = bits, group_size
    made.scales = made.scales[:, : scaled // 64]
    return made


@pytest.mark.parametrize(
    "made", [stating(bits=8), stating(group_size=128), stating(scaled=WIDTH // 2)]
)
def test_a_matrix_of_another_shape_than_it_states_is_left_to_mlx(made):
    assert multiply(made, inputs(1)) is None


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 64, 2 * WIDTH])
def test_inputs_of_another_width_are_left_to_mlx(width):
    assert multiply(layer(), mx.ones((1, width))) is None


def test_other_types_are_left_to_mlx():
    assert multiply(layer(), inputs(1).astype(mx.bfloat16)) is None


def test_a_function_that_mlx_compiles_is_computed_by_mlx():
    made = layer()

    def product(given):
        found = multiply(made, given)
        return made(given) if found is None else found

    given = inputs(2)
    assert close(mx.compile(product)(given), product(given) + made.bias)


def test_without_a_compiler_there_is_no_kernel(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(OSError, match="no C compiler"):
        load_kernel(tmp_path, path=str(tmp_path))
    assert not list(tmp_path.iterdir())


def compiler(tmp_path, script):
    """Return a private directory and a path of a compiler that is a script."""
    kept, found = tmp_path / "kept", tmp_path / "found"
    kept.mkdir(mode=0o700)
    found.mkdir()
    (found / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (found / "cc").chmod(0o755)
    return kept, str(found)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (r"printf 'caf\351' >&2; exit 1", "failed: caf\ufffd"),
        ("exit 0", "cannot open shared object"),
        ('echo "$*" > "$7"', "invalid ELF header"),
        ('echo "int x;" | /usr/bin/cc -shared -o "$7" -xc -', "wrote another library.*sort_inputs"),
    ],
)
def test_a_compiler_that_works_otherwise_leaves_no_kernel(tmp_path, script, problem):
    kept, found = compiler(tmp_path, script)
    with pytest.raises(OSError, match=problem):
        load_kernel(kept, path=found)
    assert not list(kept.iterdir())


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    kept, found = compiler(tmp_path, f"(echo started; sleep 60) > {pipe}")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as children:
        with pytest.raises(subprocess.TimeoutExpired):
            load_kernel(kept, path=found, seconds=2)
        os.set_blocking(children.fileno(), True)
        assert children.read() == "started\n"
    assert not list(kept.iterdir())


@pytest.mark.parametrize("size", [0, 100, 9000])
def test_a_kernel_that_was_cut_short_is_compiled_again(tmp_path, size):
    tmp_path.chmod(0o700)
    load_kernel(tmp_path)
    (kernel,) = tmp_path.iterdir()
    whole = kernel.read_bytes()
    kernel.unlink()
    kernel.write_bytes(whole[:size])
    load_kernel(tmp_path)
    assert kernel.stat().st_size == len(whole)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_kernel_that_others_could_write_is_not_loaded(tmp_path, mode):
    tmp_path.chmod(0o700)
    load_kernel(tmp_path)
    (kernel,) = tmp_path.iterdir()
    kernel.chmod(mode)
    with pytest.raises(OSError, match="no C compiler"):
        load_kernel(tmp_path, path="")


def test_it_is_compiled_once_for_a_private_directory(tmp_path):
    tmp_path.chmod(0o700)
    load_kernel(tmp_path)
    (kernel,) = tmp_path.iterdir()
    written = kernel.stat().st_mtime_ns
    load_kernel(tmp_path, path="")
    assert [kernel] == list(tmp_path.iterdir())
    assert kernel.stat().st_mtime_ns == written


def test_it_is_not_kept_where_others_could_exchange_it(tmp_path):
    tmp_path.chmod(0o777)
    load_kernel(tmp_path)
    assert not list(tmp_path.iterdir())


class Network(nn.Module):
    """A quantised embedding, which is the last layer too, and a layer."""

    def __init__(self, bits=4):
        super().__init__()
        mx.random.seed(5)
        self.embedding = nn.Embedding(OUTPUTS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        nn.quantize(self, group_size=64, bits=bits)
        self.set_dtype(mx.bfloat16)

    def __call__(self, tokens):
        return self.embedding.as_linear(self.layer(self.embedding(tokens)))


@pytest.mark.parametrize("tokens", [1, 5, MOST_TOKENS, MOST_TOKENS + 1, 64])
def test_a_network_stays_quantised_and_has_the_logits_of_mlx(tokens):
    given = mx.arange(tokens)[None] % OUTPUTS
    kept, plain = Network(), Network()
    plain.set_dtype(mx.float32)
    prepare_products(kept, keeps_type=False, dequantises=False, least_bytes=0)
    assert kept.layer.weight.dtype == kept.embedding.weight.dtype == mx.uint32
    assert multiply(kept.layer, inputs(1)) is not None
    assert close(kept(given), plain(given))


def test_a_network_in_training_has_gradients_for_a_few_tokens():
    trained, expected = Network(), Network()
    expected.set_dtype(mx.float32)
    prepare_products(
        trained, keeps_type=False, dequantises=False, has_gradients=True, least_bytes=0
    )
    states = inputs(2)

    def loss(states, network):
        return network.layer(states).square().sum()

    assert close(mx.grad(loss)(states, trained), mx.grad(loss)(states, expected))
