import pytest

from backend.errors import InvalidRequestError
from backend.rpc.parsing.load_options import kv_bits


@pytest.mark.parametrize(
    ("key_type", "value_type", "bits"),
    [
        ("", "", None),
        ("f16", "f16", None),
        ("bf16", "", None),
        ("", "F32", None),
        ("q8_0", "q8_0", 8),
        ("q8", "", 8),
        ("", "q4_0", 4),
        ("Q4_1", "q4", 4),
    ],
)
def test_names_of_llama_cpp_are_widths(key_type, value_type, bits, caplog):
    assert kv_bits(key_type, value_type) == bits
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "bits"),
    [("q5_0", 4), ("q5_1", 4), ("iq4_nl", 4), ("q6_k", 8), ("q8_1", 8), ("q2_K", 4), ("tq1_0", 4)],
)
def test_another_width_is_the_nearest_one_and_the_log_says_so(name, bits, caplog):
    assert kv_bits(name, "") == bits
    assert f"CacheTypeKey: MLX has no {name.lower()}, using q{bits}_0" in caplog.text


@pytest.mark.parametrize(
    ("key_type", "value_type", "bits"),
    [("q8_0", "q4_0", 8), ("q4_0", "q8_0", 8), ("f16", "q4_0", None), ("q8_0", "bf16", None)],
)
def test_of_two_widths_the_larger_one_is_taken_and_the_log_says_so(
    key_type, value_type, bits, caplog
):
    assert kv_bits(key_type, value_type) == bits
    text = f"CacheTypeKey {key_type} and CacheTypeValue {value_type}: MLX has one width for both"
    assert text in caplog.text


@pytest.mark.parametrize("name", ["int8", "q", "q9_0", "8", "f8", "turbo"])
def test_nonsense_is_refused_by_the_name_of_its_field(name):
    with pytest.raises(InvalidRequestError, match=f"^CacheTypeKey: '{name}' is unknown; known are"):
        kv_bits(name, "")
    with pytest.raises(InvalidRequestError, match=f"^CacheTypeValue: '{name}' is unknown"):
        kv_bits("q8_0", name)
