import json
import math

from backend.core.step import AlternativeLogprob, TokenLogprob
from backend.output.collect import to_json


def test_the_json_has_the_hosts_shape():
    token = TokenLogprob(5, "né".encode(), -0.25, (AlternativeLogprob(6, b"a", -1.5),))
    assert json.loads(to_json([token])) == {
        "content": [
            {
                "id": 5,
                "token": "né",
                "bytes": [110, 195, 169],
                "logprob": -0.25,
                "top_logprobs": [{"id": 6, "token": "a", "bytes": [97], "logprob": -1.5}],
            }
        ]
    }


def test_half_a_character_keeps_its_bytes():
    entry = json.loads(to_json([TokenLogprob(1, b"\xf0\x9f", -1.0)]))["content"][0]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xF0, 0x9F])


def test_what_json_has_no_number_for_is_clamped():
    values = (-math.inf, math.nan, math.inf)
    text = to_json([TokenLogprob(1, b"a", value) for value in values])
    assert [entry["logprob"] for entry in json.loads(text)["content"]] == [-9999.0] * 3
    assert b"NaN" not in text
    assert b"Infinity" not in text
