"""Image to the tensor that a vision model takes: resize, crop or pad, normalise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image as Pillow

from pagein.engines.local.model import Floats
from pagein.engines.recipes.contract import Session
from pagein.errors import ConfigError, LoadFailed

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_DEVIATION = (58.395, 57.12, 57.375)
"""Mean and deviation of ImageNet's red, green and blue on the scale 0 to 255 (torchvision: 0.485 × 255 …)."""
Filter = Literal["bilinear", "bicubic", "lanczos", "box"]


@dataclass(frozen=True, slots=True)
class Box:
    """Where the image lies in the model's square, in pixels."""

    left: int
    top: int
    width: int
    height: int


def cropped(image: Image, shorter: int, size: int, way: Filter) -> Image:
    """Scale the shorter side to ``shorter`` and cut the middle ``size`` × ``size`` out."""
    scale = shorter / min(image.size)
    width, height = (max(round(side * scale), size) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    # one step: only the part that is seen is computed
    source = (left / scale, top / scale, (left + size) / scale, (top + size) / scale)
    bounded = tuple(min(max(edge, 0), image.size[i % 2]) for i, edge in enumerate(source))
    return image.resize((size, size), _FILTERS[way], box=(bounded[0], bounded[1], bounded[2], bounded[3]))


def padded(image: Image, size: int, way: Filter) -> tuple[Image, Box]:
    """Scale the longer side to ``size`` and centre the image on a black square; also says where it lies."""
    scale = size / max(image.size)
    width, height = (max(round(side * scale), 1) for side in image.size)
    box = Box((size - width) // 2, (size - height) // 2, width, height)
    square = Pillow.new("RGB", (size, size))
    square.paste(image.resize((width, height), _FILTERS[way]), (box.left, box.top))
    return square, box


def tensor(image: Image, mean: list[float] | float, deviation: list[float] | float) -> Floats:
    """Return (pixel − mean) / deviation as 1 × 3 × height × width; pixels and both go from 0 to 255."""
    pixels = np.asarray(image, np.float32)
    normal: Floats = ((pixels - np.asarray(mean)) / np.asarray(deviation)).astype(np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1)[None])


def check_scaling(model: str, **values: list[float] | float) -> None:
    """Raise ConfigError unless each value is one number or three, and the deviation is not 0."""
    for name, value in values.items():
        given = value if isinstance(value, list) else [value] * 3
        if len(given) != 3 or (name == "deviation" and 0 in given):
            what = "a number or three, and not 0" if name == "deviation" else "a number or three"
            raise ConfigError(f"model {model!r}: option {name!r} takes {what}, not {value!r}", model=model)


def image_input(session: Session, size: int, what: str) -> str:
    """Return the name of a model's one input; raises LoadFailed unless it takes 1 × 3 × size × size."""
    inputs = session.get_inputs()
    fits = len(inputs) == 1 and len(inputs[0].shape) == 4
    sides = zip(inputs[0].shape[1:], (3, size, size), strict=True) if fits else ()
    if not fits or any(isinstance(has, int) and has != wanted for has, wanted in sides):
        listing = ", ".join(f"{entry.name} {entry.shape}" for entry in inputs)
        raise LoadFailed(f"{what} feeds one input of 1 × 3 × {size} × {size}; the model has {listing}")
    name: str = inputs[0].name
    return name


_FILTERS = {
    "bilinear": Pillow.Resampling.BILINEAR,
    "bicubic": Pillow.Resampling.BICUBIC,
    "lanczos": Pillow.Resampling.LANCZOS,
    "box": Pillow.Resampling.BOX,
}
