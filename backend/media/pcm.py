"""Decodes sounds with miniaudio, in chunks: some formats pack an hour of silence into a few bytes.

Also a program: the Vorbis decoder of miniaudio 1.71 corrupts memory on damaged files, so
`isolated_samples` runs it in a child process that may crash.
"""

import resource
import subprocess
import sys
from collections.abc import Iterator

import miniaudio

_CHUNK_SAMPLES = 16384
_TIMEOUT_S = 20.0
_MAX_PROCESS_BYTES = 2**30


class DamagedSoundError(Exception):
    """The sound cannot be decoded."""


def samples(data: bytes, sampling_rate: int, max_samples: int) -> bytes:
    """Return native float32 mono at the given rate; exceeds the limit by at most one chunk.

    Raises:
        DamagedSoundError: It cannot be decoded.
    """
    return b"".join(_chunks(data, sampling_rate, max_samples))


def isolated_samples(data: bytes, sampling_rate: int, max_samples: int) -> bytes:
    """Run `samples` in a child process, which takes 0.1 s to start.

    Raises:
        DamagedSoundError: The sound cannot be decoded, or the child crashed or took too long.
    """
    # Run by path, with its directory off the module path: it imports nothing of the backend.
    command = [sys.executable, "-P", __file__, str(sampling_rate), str(max_samples)]
    try:
        done = subprocess.run(  # noqa: S603 - our own file and two numbers
            command, input=data, capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        raise DamagedSoundError from None
    return done.stdout


def _chunks(data: bytes, sampling_rate: int, max_samples: int) -> Iterator[bytes]:
    count = 0
    try:
        stream = miniaudio.stream_memory(
            data, miniaudio.SampleFormat.FLOAT32, 1, sampling_rate, _CHUNK_SAMPLES
        )
        for chunk in stream:
            yield chunk.tobytes()
            count += len(chunk)
            if count > max_samples:
                return
    except miniaudio.MiniaudioError:
        raise DamagedSoundError from None


def _main(sampling_rate: str, max_samples: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_PROCESS_BYTES, _MAX_PROCESS_BYTES))
    data = sys.stdin.buffer.read()
    sys.stdout.buffer.write(samples(data, int(sampling_rate), int(max_samples)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
