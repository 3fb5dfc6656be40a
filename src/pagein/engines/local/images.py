"""Decodes uploaded images to RGB, within a limit of pixels that is checked before any of them is decoded."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from pagein.errors import BadRequest

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 32_000_000
"""96 MB as RGB: the most that one image may add to a worker while it is decoded."""
_ENOUGH = (1024, 1024)
"""JPEGs of at least twice this are decoded at a half, a quarter or an eighth: no model here sees more."""


def read_image(data: bytes) -> Image.Image:
    """Return the image upright and in RGB, transparent parts on white; raises BadRequest that names the fault."""
    if not data:
        raise BadRequest("image is empty", param="image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is tighter
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadRequest(f"image is not one of {', '.join(FORMATS)}", param="image") from None
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise BadRequest(f"image cannot be read: {error}", param="image") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadRequest(
            f"image has {width} × {height} = {width * height} pixels, at most {MAX_PIXELS} are taken",
            param="image",
            pixels=width * height,
            limit_pixels=MAX_PIXELS,
        )
    try:
        image.draft("RGB", _ENOUGH)
        return _flat(ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise BadRequest(f"image is damaged: {error}", param="image") from error


def _flat(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode.startswith("I;16"):  # PIL cuts 16-bit greys off at 255 instead of scaling them
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
