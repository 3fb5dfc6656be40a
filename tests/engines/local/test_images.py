"""Decoding images: upright, RGB, and bounded."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from pagein.engines.local import images
from pagein.engines.local.images import read_image
from pagein.errors import BadRequest


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def black(side: int) -> bytes:
    """A whole black PNG of one bit a pixel; Pillow takes seconds to compress the largest."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + -(-side // 8)) * side))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_known_format_becomes_rgb(kind):
    """Each accepted format is decoded to RGB of the same size."""
    image = read_image(saved(Image.new("RGB", (8, 6), (200, 40, 40)), kind))
    assert (image.mode, image.size) == ("RGB", (8, 6))
    assert np.abs(np.array(image.getpixel((4, 3))) - [200, 40, 40]).max() < 8


def test_transparent_parts_are_white():
    """Transparency is shown on white, whether it is a channel or a colour of the palette."""
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert read_image(saved(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 0)
    assert read_image(saved(palette, "PNG", transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_grey_keeps_its_brightness():
    """A 16-bit grey of half brightness is half bright, not white."""
    grey = Image.fromarray(np.full((2, 2), 32768, np.uint16))
    assert read_image(saved(grey, "PNG")).getpixel((0, 0)) == (128, 128, 128)


def test_cameras_orientation_is_obeyed():
    """EXIF orientation 6 (turned by 90°) swaps width and height."""
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(saved(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).size == (4, 8)


def test_too_many_pixels_are_refused_before_decoding():
    """A small file that unpacks to more pixels than the limit is refused with both numbers."""
    bomb = black(8000)
    assert len(bomb) < 20_000
    with pytest.raises(BadRequest, match="8000 × 8000 = 64000000 pixels, at most 32000000"):
        read_image(bomb)


def test_absurd_sizes_are_refused_too():
    """Sizes at which Pillow itself stops are the same BadRequest."""
    with pytest.raises(BadRequest, match=r"pixels|cannot be read"):
        read_image(black(20_000))


def test_large_jpegs_are_decoded_small():
    """A JPEG far larger than any model sees is decoded at a fraction of its size."""
    image = read_image(saved(Image.new("RGB", (4096, 4096), "green"), "JPEG"))
    assert image.size == (1024, 1024)


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0junk", b"%PDF-1.4", b"P6 1 1 255 abc"]
)
def test_damaged_and_other_files_are_refused(data):
    """Empty, cut and foreign files are BadRequest on the field image, never another exception."""
    with pytest.raises(BadRequest) as caught:
        read_image(data)
    assert caught.value.details["param"] == "image"


def test_a_cut_jpeg_is_damaged():
    """An image whose header is fine and whose data ends early is refused."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    with pytest.raises(BadRequest, match="damaged"):
        read_image(saved(noise, "JPEG")[:2000])


def test_the_limit_is_what_the_docs_say():
    """The pixel limit bounds one decoded image to 96 MB."""
    assert images.MAX_PIXELS * 3 == 96_000_000
