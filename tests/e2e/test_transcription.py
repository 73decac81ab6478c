"""AudioTranscription on a tiny random model that hears."""

import math
import struct
import wave

import grpc
import numpy as np
import pytest
from serving import code_of, served
from waiting import until

from backend.config import MAX_TRANSCRIPTIONS, SPEECH_PASSAGE_S, SPEECH_RATE_HZ
from backend.media.speech import passages
from backend.pb import backend_pb2 as pb

pytestmark = [
    pytest.mark.mlx,
    # As an error it would be swallowed, and the processor of gemma4 not be found.
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]
CODE = grpc.StatusCode


def recording(path, seconds, *, pause_at=None):
    """Write a tone, at 8 kHz, with a pause of a second."""
    rate = 8000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        for second in range(seconds):
            level = 0 if second == pause_at else 8000
            samples = (int(level * math.sin(0.3 * n)) for n in range(rate))
            file.writeframes(struct.pack(f"<{rate}h", *samples))
    return str(path)


async def test_a_recording_is_transcribed_in_passages_cut_at_pauses(
    shared, tiny_vision_models, tmp_path, monkeypatch
):
    # Of itself the model would hardly end.
    monkeypatch.setattr("backend.pipeline.transcribe.MAX_PASSAGE_TOKENS", 40)
    path = recording(tmp_path / "long.wav", 33, pause_at=24)
    async with shared(tiny_vision_models("gemma4"), MaxModelLen=4096) as backend:
        request = pb.TranscriptRequest(dst=path, language="en", prompt="Ada, Linus")
        whole = await backend.stub.AudioTranscription(request)
        parts = [part async for part in backend.stub.AudioTranscriptionStream(request)]
    starts = [segment.start / 1e9 for segment in whole.segments]
    ends = [segment.end / 1e9 for segment in whole.segments]
    assert starts == [0.0, pytest.approx(24.5, abs=0.5)]
    assert ends == [starts[1], pytest.approx(33.0, abs=0.1)]
    assert whole.duration == pytest.approx(33.0, abs=0.1)
    assert whole.language == "en"
    assert whole.text == " ".join(filter(None, (segment.text for segment in whole.segments)))
    assert parts[-1].final_result == whole
    assert "".join(part.delta for part in parts).split() == whole.text.split()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"dst": ""}, "dst: is empty"),
        ({"dst": "/nowhere/a.wav"}, "dst: /nowhere/a.wav cannot be read: No such file"),
        ({"dst": __file__}, "dst: "),
        ({"dst": "a.wav", "temperature": -1.0}, "temperature: must be at least 0, not -1"),
        ({"dst": "a.wav", "prompt": "a" * 5000}, "prompt: has 5000 characters"),
    ],
)
async def test_what_cannot_be_heard_is_refused_by_its_field(
    shared, tiny_vision_models, fields, problem
):
    async with shared(tiny_vision_models("gemma4"), MaxModelLen=4096) as backend:
        code, details = await code_of(
            backend.stub.AudioTranscription(pb.TranscriptRequest(**fields))
        )
    assert code is CODE.INVALID_ARGUMENT
    assert details.startswith(problem)


async def test_recordings_beyond_those_that_are_heard_at_once_are_refused(
    tiny_vision_models, tmp_path
):
    request = pb.TranscriptRequest(dst=recording(tmp_path / "long.wav", 90))
    async with served(tiny_vision_models("gemma4"), MaxModelLen=4096) as backend:
        heard = [backend.stub.AudioTranscriptionStream(request) for _ in range(MAX_TRANSCRIPTIONS)]
        for call in heard:
            await call.read()
        code, details = await code_of(backend.stub.AudioTranscription(request))
        assert (code, details) == (
            CODE.RESOURCE_EXHAUSTED,
            "4 transcriptions are running, at most 4 may: try later",
        )
        for call in heard:
            call.cancel()
        await until(lambda: backend.is_idle)
        short = pb.TranscriptRequest(dst=recording(tmp_path / "short.wav", 1))
        assert (await backend.stub.AudioTranscription(short)).duration == pytest.approx(1, abs=0.1)


async def test_a_model_that_does_not_hear_says_so(tiny_models, tmp_path):
    path = recording(tmp_path / "a.wav", 1)
    async with served(tiny_models("llama")) as backend:
        code, details = await code_of(
            backend.stub.AudioTranscription(pb.TranscriptRequest(dst=path))
        )
    assert code is CODE.UNIMPLEMENTED
    assert "takes no audio; load a model that does" in details


@pytest.mark.parametrize("seconds", [0.1, SPEECH_PASSAGE_S, SPEECH_PASSAGE_S + 1, 95.3])
def test_passages_are_the_whole_recording(seconds):
    generator = np.random.default_rng(1)
    samples = generator.standard_normal(int(seconds * SPEECH_RATE_HZ)).astype(np.float32)
    found = list(passages(samples))
    assert (np.concatenate([passage.samples for passage in found]) == samples).all()
    assert all(passage.end_s - passage.start_s <= SPEECH_PASSAGE_S for passage in found)
