"""Saliency maps: vision transformers with a head that says how much each pixel matters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image as Pillow

from pagein.engines.local.model import Floats, SaliencyMap, SaliencyMapper
from pagein.engines.recipes.contract import OpenSession, Place, Recipe, Session
from pagein.engines.recipes.pixels import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Filter,
    check_scaling,
    image_input,
    padded,
    tensor,
)
from pagein.errors import ConfigError, LoadFailed

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Saliency(Recipe):
    """Image on a padded square → one value per pixel → a small grid over the image alone."""

    size: int = 224
    """Side of the square that the model sees."""
    grid: int = 16
    """Rows and columns of the map in the answer."""
    mean: float | list[float] = field(default_factory=lambda: list(IMAGENET_MEAN))
    """Subtracted from the pixels, which go from 0 to 255; one number, or one each for red, green and blue."""
    deviation: float | list[float] = field(default_factory=lambda: list(IMAGENET_DEVIATION))
    """What the difference is divided by."""
    filter: Filter = "box"
    """How pixels are interpolated."""

    def build(self, place: Place, open_session: OpenSession) -> SaliencyMapper:
        """Load the model."""
        check_scaling(place.name, mean=self.mean, deviation=self.deviation)
        if not 0 < self.grid <= self.size:
            raise ConfigError(f"model {place.name!r}: option 'grid' {self.grid} must not pass 'size' {self.size}")
        return _Mapper(self, open_session(place.model_file()))


class _Mapper(SaliencyMapper):
    def __init__(self, recipe: Saliency, session: Session) -> None:
        self._recipe, self._session = recipe, session
        self._input = image_input(session, recipe.size, "recipe 'saliency'")

    def saliency(self, image: Image) -> SaliencyMap:
        recipe = self._recipe
        square, box = padded(image, recipe.size, recipe.filter)
        output = self._session.run(None, {self._input: tensor(square, recipe.mean, recipe.deviation)})[0]
        whole = np.asarray(output, np.float32)
        if whole.size != recipe.size**2:
            raise LoadFailed(
                f"recipe 'saliency' reads {recipe.size} × {recipe.size} values, the model gives {whole.shape}"
            )
        seen = whole.reshape(recipe.size, recipe.size)[box.top : box.top + box.height, box.left : box.left + box.width]
        return summed_up(seen, recipe.grid)


def summed_up(values: Floats, grid: int) -> SaliencyMap:
    """Return the mean of each cell of a grid over the values, and the place of the highest value."""
    row, column = divmod(int(values.argmax()), values.shape[1])
    cells = np.asarray(Pillow.fromarray(values).resize((grid, grid), Pillow.Resampling.BOX), np.float32)
    x, y = (column + 0.5) / values.shape[1], (row + 0.5) / values.shape[0]
    return SaliencyMap(cells, x, y, float(values[row, column]))
