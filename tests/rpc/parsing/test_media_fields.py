import base64

import pytest

from backend.config import MAX_IMAGE_BYTES, MediaLimits
from backend.core.prompt import MediaKind, Medium
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.load_options import model_options
from backend.rpc.parsing.message_fields import media


def read(limits=None, **fields):
    return media(pb.PredictOptions(**fields), limits or MediaLimits())


def limits_of(**fields):
    return model_options(pb.ModelOptions(Model="org/name", **fields)).media_limits


def test_a_request_of_text_has_no_media():
    assert read(Prompt="hi") == ()


def test_media_keep_the_order_of_their_kind():
    assert read(Images=["a", "b"], Videos=["c"], Audios=["d", "e"]) == (
        Medium(MediaKind.AUDIO, "Audios[0]", "d"),
        Medium(MediaKind.AUDIO, "Audios[1]", "e"),
        Medium(MediaKind.IMAGE, "Images[0]", "a"),
        Medium(MediaKind.IMAGE, "Images[1]", "b"),
        Medium(MediaKind.VIDEO, "Videos[0]", "c"),
    )


@pytest.mark.parametrize("field", ["Images", "Videos", "Audios"])
@pytest.mark.parametrize("payload", ["", " \n"])
def test_an_empty_payload_is_refused_by_its_place(field, payload):
    with pytest.raises(InvalidRequestError) as caught:
        read(**{field: ["aGk=", payload]})
    assert str(caught.value) == f"{field}[1]: is empty"


def test_a_payload_that_no_decoding_makes_short_enough_is_refused():
    problem = r"^Images\[0\]: has 53,333,336 characters, at most 31,457,280 are read$"
    with pytest.raises(InvalidRequestError, match=problem):
        read(Images=["A" * 53_333_336])


def test_a_file_of_the_greatest_length_is_not_refused_for_its_line_breaks():
    payload = base64.encodebytes(bytes(MAX_IMAGE_BYTES)).decode()
    assert len(read(Images=[payload])) == 1


@pytest.mark.parametrize("field", ["Images", "Videos", "Audios"])
def test_more_than_the_limit_is_refused_with_both_numbers(field):
    limits = MediaLimits(images=2, videos=2, audios=2)
    assert len(read(limits, **{field: ["a", "b"]})) == 2
    with pytest.raises(InvalidRequestError) as caught:
        read(limits, **{field: ["a", "b", "c"]})
    assert str(caught.value) == f"{field}: holds 3, at most 2 per request are allowed"


def test_limits_come_with_the_model_and_zero_is_the_default():
    assert limits_of() == MediaLimits()
    assert limits_of(
        LimitImagePerPrompt=1, LimitVideoPerPrompt=2, LimitAudioPerPrompt=3
    ) == MediaLimits(images=1, videos=2, audios=3)


@pytest.mark.parametrize(
    "field", ["LimitImagePerPrompt", "LimitVideoPerPrompt", "LimitAudioPerPrompt"]
)
def test_a_negative_limit_is_refused(field):
    with pytest.raises(InvalidRequestError) as caught:
        limits_of(**{field: -1})
    assert str(caught.value) == f"{field}: must be at least 0, not -1"
