"""Small files of pictures, sounds and films, made here or by an encoder long ago."""

import base64
import io
import json
import math
import struct
import wave
import zlib
from pathlib import Path

from PIL import Image

from backend.core.prompt import MediaKind, Medium

# A tone of 440 Hz for a quarter of a second at 8 kHz, by FFmpeg; of Opus only the first page.
SOUNDS = {
    name: base64.b64decode(text)
    for name, text in json.loads(
        (Path(__file__).parent.parent / "media" / "sounds.json").read_text(encoding="utf-8")
    ).items()
}


def medium(data, kind=MediaKind.IMAGE, field="Images[0]"):
    """Return the medium of a request, from the bytes or the text of a file."""
    payload = data if isinstance(data, str) else base64.b64encode(data).decode()
    return Medium(kind, field, payload)


def encoded(image, file_format, **options):
    """Return the file that Pillow writes."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def gradient(width=32, height=24):
    """Return a picture in RGB, no two rows or columns of which are equal."""
    picture = Image.new("RGB", (width, height))
    picture.putdata(
        [(x * 255 // width, y * 255 // height, 64) for y in range(height) for x in range(width)]
    )
    return picture


def png_of_size(width, height, data=b""):
    """Return a PNG that claims a size and holds other pixels, or none."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def animation(file_format, count, size=(8, 8), **options):
    """Return frames of which number n is n parts of red."""
    frames = [Image.new("RGB", size, (number, 0, 0)) for number in range(count)]
    return encoded(
        frames[0], file_format, save_all=True, append_images=frames[1:], duration=50, **options
    )


def wav(seconds=0.25, rate=8000, channels=1, hertz=440):
    """Return a sine of half the greatest loudness."""
    frames = [
        struct.pack("<h", int(16384 * math.sin(2 * math.pi * hertz * n / rate))) * channels
        for n in range(int(seconds * rate))
    ]
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((channels, 2, rate, 0, "NONE", ""))
        sound.writeframes(b"".join(frames))
    return file.getvalue()


def film(av, count=6, size=(64, 48), file_format="mp4", codec="mpeg4"):
    """Return a film of ten frames a second, by PyAV."""
    file = io.BytesIO()
    with av.open(file, "w", format=file_format) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_image(Image.new("RGB", size, (number * 8, 0, 0)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
