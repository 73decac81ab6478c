from dataclasses import replace

import pytest
from scripted_engine import make_model

from backend.config import ModelOptions
from backend.core.request import GenerationCall, GenerationParams
from backend.errors import ContextLengthError
from backend.pipeline.rendering import render

PARAMS = GenerationParams(request_id="r")

WIDE = make_model(ModelOptions(model="org/tiny"))
NARROW = replace(WIDE, card=replace(WIDE.card, context_length=4))


def test_a_prompt_that_fits_leaves_room_for_a_token_of_the_reply():
    assert render(GenerationCall(params=PARAMS, prompt="abc"), NARROW).token_ids == tuple(b"abc")


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("abcd", "Prompt: 4 tokens leave no room for a reply: "),
        ("abcde", "Prompt: at least 5 tokens do not fit: "),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(prompt, problem):
    with pytest.raises(ContextLengthError, match=problem) as raised:
        render(GenerationCall(params=PARAMS, prompt=prompt), NARROW)
    # litellm, OpenHands and others know by these words that they must shorten a conversation.
    assert str(raised.value).endswith(
        "this model's maximum context length is 4 tokens, please reduce the length of the input"
    )
