from pathlib import Path

import pytest

from backend.errors import LoadError, LoadFailedError, OutOfMemoryError, UnsupportedModelError
from backend.model.checkpoint.failures import UPSTREAM_FAILURES, as_load_error

WHERE = Path("models/tiny")


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (MemoryError(), OutOfMemoryError, "does not fit into memory"),
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), OutOfMemoryError, "allocate 9"),
        (RuntimeError("cudaMallocAsync failed: out of memory"), OutOfMemoryError, "out of memory"),
        (ValueError("Model type gpt6 not supported."), UnsupportedModelError, "'gpt6'"),
        (ValueError("Pass trust_remote_code=True"), UnsupportedModelError, "set trust_remote_code"),
        (ValueError("Missing 2 parameters: \na,\nb."), LoadError, "do not match its config.json"),
        (ImportError("No module named 'x'"), UnsupportedModelError, "not installed: No module"),
        (SystemExit(1), UnsupportedModelError, "needs a package"),
        (KeyError("rope"), LoadFailedError, "KeyError: 'rope'"),
    ],
)
def test_upstream_failures_are_told_in_a_users_words(
    failure: BaseException, kind: type[LoadError], words: str
):
    error = as_load_error(failure, WHERE)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.mlx
def test_kernels_for_apple_gpus_are_named_as_the_reason():
    import mlx.core as mx

    if mx.metal.is_available():
        pytest.skip("they can be computed here")
    kernel = mx.fast.metal_kernel("copied", ["a"], ["b"], "b[0] = a[0];")
    one = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(RuntimeError) as raised:
        kernel(inputs=[mx.ones(1)], output_shapes=[(1,)], output_dtypes=[mx.float32], **one)
    error = as_load_error(raised.value, WHERE)
    assert type(error) is UnsupportedModelError
    assert "kernels for Apple GPUs only" in str(error)


@pytest.mark.parametrize("kind", [NameError, UnboundLocalError, StopIteration, EOFError])
def test_odd_failures_of_model_code_are_of_the_load(kind: type[Exception]):
    assert issubclass(kind, UPSTREAM_FAILURES)


def test_a_long_failure_is_cut_to_one_line():
    text = str(as_load_error(ValueError("Missing 900 parameters: " + "a,\n" * 900), WHERE))
    assert "\n" not in text
    assert len(text) < 600
