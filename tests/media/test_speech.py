import os

import pytest
from media_files import wav

from backend.config import MAX_SPEECH_BYTES, SPEECH_RATE_HZ
from backend.errors import InvalidRequestError
from backend.media.speech import read_speech


def refusal(path):
    with pytest.raises(InvalidRequestError, match="dst: ") as caught:
        read_speech("dst", path)
    return str(caught.value)


def test_a_recording_is_read_at_the_rate_of_speech(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(seconds=0.25))
    assert len(read_speech("dst", path)) == SPEECH_RATE_HZ // 4


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_before_anybody_writes_to_it(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert refusal(path) == f"dst: {path} is not a regular file"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(path):
    assert refusal(path) == f"dst: {path} is not a regular file"


def test_a_directory_is_refused(tmp_path):
    assert refusal(tmp_path) == f"dst: {tmp_path} is not a regular file"


def test_a_file_that_is_not_there_is_refused_in_the_systems_words(tmp_path):
    path = tmp_path / "none.wav"
    assert refusal(path) == f"dst: {path} cannot be read: No such file or directory"


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "hole.wav"
    with path.open("wb") as file:
        file.truncate(MAX_SPEECH_BYTES + 1)
    assert refusal(path) == "dst: has 536,870,913 bytes, at most 536,870,912 are read"
