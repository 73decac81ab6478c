"""Families whose towers cannot be tiny with mlx-vlm's own code: equal to mlx-vlm, in small."""

from functools import cache

import grpc
import numpy as np
import pytest
from serving import chat, code_of, stream, user
from vision import Reference, parts, picture, shown, token_ids, wav

from scripts.sweep.vision_models import build_vision_model

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]

COUNT = 8
SYSTEM = {"role": "system", "content": "You see. " + "be bi ba bo du " * 4}


async def reply(backend, text, **media):
    request = chat([SYSTEM, user(text)], Tokens=COUNT, Logprobs=1, IgnoreEOS=True, **media)
    return token_ids(*(await stream(backend.stub, request)).replies)


def agree(ours, theirs):
    return len(theirs) > 1 and ours[: len(theirs)] == theirs


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the directory of a family, and mlx-vlm's reference: made once, as they are large."""

    @cache
    def of(family):
        directory = build_vision_model(family, tmp_path_factory.mktemp(family))
        return directory, Reference(directory)

    return of


@pytest.mark.parametrize("family", ["fastvlm", "gemma3n"])
@pytest.mark.one_in(2)
async def test_pictures_are_read_as_mlx_vlm_reads_them(shared, built, family):
    directory, reference = built(family)
    questions = {"What is it?": [picture(2, (96, 48))], "Text, be bi.": []}
    async with shared(directory, TrustRemoteCode=True) as backend:
        ours = [await reply(backend, text, **shown(*images)) for text, images in questions.items()]
        blind = await reply(backend, "What is it?")
    assert ours[0] != blind
    for tokens, (text, images) in zip(ours, questions.items(), strict=True):
        messages = [SYSTEM, {"role": "user", "content": parts(text, *images)}]
        assert agree(tokens, reference.tokens(messages, COUNT))


async def test_gemma3n_hears_sounds_as_mlx_vlm_does(shared, built):
    directory, reference = built("gemma3n")
    content = [{"type": "audio"}, {"type": "text", "text": "What is it?"}]
    async with shared(directory, TrustRemoteCode=True) as backend:
        heard = {
            hertz: await reply(backend, "What is it?", Audios=[wav(tone(hertz))])
            for hertz in (220, 880)
        }
    assert heard[220] != heard[880]
    messages = [SYSTEM, {"role": "user", "content": content}]
    for hertz, tokens in heard.items():
        assert agree(tokens, reference.tokens(messages, COUNT, audio=[tone(hertz)]))


def tone(hertz):
    times = np.arange(16_000) / 16_000
    # Exact in 16 bits, so that both sides hear the same samples.
    return (np.round(np.sin(2 * np.pi * hertz * times) * 16_000) / 32_768).astype(np.float32)


async def test_a_sound_that_gemma3n_would_cut_is_refused(shared, built):
    """Upstream contract: its processor drops all sound after 30 s and reports nothing."""
    directory, _ = built("gemma3n")
    request = chat([user("What is it?")], Audios=[wav(np.zeros(31 * 16_000))], Tokens=1)
    async with shared(directory, TrustRemoteCode=True) as backend:
        code, details = await code_of(backend.stub.Predict(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Audios[0]" in details
    assert "is 31.0 s long, 30 s is the most that is heard" in details
