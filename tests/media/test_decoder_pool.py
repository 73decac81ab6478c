"""Media are decoded in processes that end with their callers, and give their memory back."""

import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from media_files import animation, encoded, gradient, medium, wav
from PIL import Image
from waiting import wait_until

from backend.core.prompt import MediaKind
from backend.errors import HelperLostError, InvalidRequestError
from backend.media.decode import decode
from backend.media.decoder_pool import MAX_ANSWER_BYTES, DecoderProcesses, start_decoding
from common.helper import HelperProcess
from common.rpc import AbandonedError, enter_work

IMAGE, AUDIO, VIDEO = MediaKind.IMAGE, MediaKind.AUDIO, MediaKind.VIDEO
RATE = 16_000
SMALL = medium(encoded(gradient(), "PNG"))


class Watched(HelperProcess):
    """Counts the frames that it has been sent."""

    sent = 0

    def send(self, data, deadline):
        super().send(data, deadline)
        self.sent += 1


@pytest.fixture
def started():
    """All processes, in the order of their starts."""
    return []


@pytest.fixture
def processes(started):
    def start():
        started.append(Watched(start_decoding, max_answer_bytes=MAX_ANSWER_BYTES))
        return started[-1]

    made = DecoderProcesses(2, start=start)
    yield made
    made.close()


def pixels(images):
    return [(image.mode, image.size, image.tobytes()) for image in images]


def test_pictures_are_the_same_as_here(processes):
    # Of one band, and of several, the last of which is shorter.
    for size in ((32, 24), (1_000, 777), (777, 1_000)):
        data = encoded(gradient(32, 24).resize(size), "PNG")
        there = processes.decode(medium(data), sampling_rate=RATE)
        here = decode(medium(data), sampling_rate=RATE)
        assert there == here
        assert pixels([there.image]) == pixels([here.image])


def test_sounds_and_films_are_the_same_as_here(processes):
    sound = medium(wav(seconds=20, rate=RATE), AUDIO)
    there, here = (each(sound, sampling_rate=RATE) for each in (processes.decode, decode))
    assert there == here
    assert (there.samples == here.samples).all()
    film = medium(animation("GIF", 5), VIDEO)
    there, here = (each(film, sampling_rate=RATE) for each in (processes.decode, decode))
    assert there == here
    assert [frame.time_s for frame in there.frames] == [frame.time_s for frame in here.frames]
    assert pixels(f.image for f in there.frames) == pixels(f.image for f in here.frames)


def test_a_refusal_names_the_field_and_the_process_goes_on(processes, started):
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match=r"^Images\[0\]: is PDF; the supported"):
            processes.decode(medium(b"%PDF-1.7\n"), sampling_rate=RATE)
    assert len(started) == 1


def test_a_process_ends_soon_after_its_caller_and_another_serves(processes, started):
    processes.decode(SMALL, sampling_rate=RATE)
    # It takes the next medium for ever.
    os.kill(started[0].process.pid, signal.SIGSTOP)
    abandoned = threading.Event()

    def ask():
        enter_work(abandoned)
        with pytest.raises(AbandonedError):
            processes.decode(SMALL, sampling_rate=RATE)

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        wait_until(lambda: started[0].sent == 2)
        abandoned.set()
        asked.result(20)
    assert not started[0].is_alive
    assert processes.decode(SMALL, sampling_rate=RATE) == decode(SMALL, sampling_rate=RATE)
    assert len(started) == 2


def test_the_number_of_processes_is_bounded(processes, started):
    data = medium(encoded(gradient(200, 200), "PNG"))
    with ThreadPoolExecutor(8) as threads:
        done = threads.map(lambda _: processes.decode(data, sampling_rate=RATE), range(12))
        assert len({each.digest for each in done}) == 1
    assert len(started) <= 2


@pytest.mark.parametrize("kills", [1, 2])
def test_a_medium_is_decoded_anew_if_its_process_is_killed_but_not_twice(processes, started, kills):
    processes.decode(SMALL, sampling_rate=RATE)
    os.kill(started[0].process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(processes.decode, SMALL, sampling_rate=RATE)
        wait_until(lambda: started[0].sent == 2)
        for number in range(kills):
            wait_until(lambda number=number: len(started) > number)
            os.kill(started[number].process.pid, signal.SIGKILL)
        if kills == 1:
            assert asked.result(60) == decode(SMALL, sampling_rate=RATE)
        else:
            with pytest.raises(
                HelperLostError, match="was killed twice, or none can start: try again"
            ):
                asked.result(60)


def test_without_descriptors_for_a_process_one_is_told_to_try_again(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = DecoderProcesses(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(HelperLostError, match="none can start: try again"):
            processes.decode(SMALL, sampling_rate=RATE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "a helper process cannot be started: [Errno 24] Too many open files" in caplog.text
    assert processes.decode(SMALL, sampling_rate=RATE) == decode(SMALL, sampling_rate=RATE)
    processes.close()


def test_a_medium_that_ends_its_process_is_refused():
    ended = [sys.executable, "-c", "raise SystemExit(1)"]
    processes = DecoderProcesses(
        start=lambda: HelperProcess(lambda _: subprocess.Popen(ended), max_answer_bytes=1)
    )
    with pytest.raises(InvalidRequestError, match=r"^Images\[0\]: takes more than 30 s or too"):
        processes.decode(SMALL, sampling_rate=RATE)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_largest_picture_leaves_no_memory(processes, started):
    def resident_mb():
        statm = Path(f"/proc/{started[0].process.pid}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    processes.decode(medium(encoded(gradient(), "PNG")), sampling_rate=RATE)
    before = resident_mb()
    large = medium(encoded(Image.new("RGB", (4_096, 4_096)), "PNG"))
    assert processes.decode(large, sampling_rate=RATE).image.size == (4_096, 4_096)
    processes.decode(medium(encoded(gradient(), "PNG")), sampling_rate=RATE)
    assert resident_mb() < before + 16
