"""Image classification: convolutional networks and vision transformers with one score per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pagein.engines.local.model import Classifier, Floats, Label
from pagein.engines.recipes.contract import OpenSession, Place, Recipe, Session
from pagein.engines.recipes.pixels import Filter, check_scaling, cropped, image_input, tensor
from pagein.errors import ConfigError, LoadFailed

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Classification(Recipe):
    """Image → scores → labels. Mean and deviation are those of the Lite, MobileNet and most ViT families.

    torchvision's models want mean [123.675, 116.28, 103.53] and deviation [58.395, 57.12, 57.375].
    """

    labels: str = "labels.txt"
    """File beside the model: one label a line, in the order of the scores."""
    resize: int = 256
    """Length of the shorter side before the crop."""
    size: int = 224
    """Side of the square from the middle that the model sees."""
    mean: float | list[float] = 127.0
    """Subtracted from the pixels, which go from 0 to 255; one number, or one each for red, green and blue."""
    deviation: float | list[float] = 128.0
    """What the difference is divided by."""
    filter: Filter = "bicubic"
    """How pixels are interpolated."""
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"
    """How scores become probabilities; none where the model does it."""

    def build(self, place: Place, open_session: OpenSession) -> Classifier:
        """Load labels and model."""
        check_scaling(place.name, mean=self.mean, deviation=self.deviation)
        if not 0 < self.size <= self.resize:
            raise ConfigError(f"model {place.name!r}: option 'size' {self.size} must not pass 'resize' {self.resize}")
        labels = read_labels(place.beside(self.labels))
        return _ImageClassifier(self, labels, open_session(place.model_file()))


class _ImageClassifier(Classifier):
    def __init__(self, recipe: Classification, labels: list[str], session: Session) -> None:
        self._recipe, self._labels, self._session = recipe, labels, session
        self._input = image_input(session, recipe.size, "recipe 'classification'")
        classes = session.get_outputs()[0].shape[-1]
        if isinstance(classes, int) and classes != len(labels):
            raise LoadFailed(f"{recipe.labels} has {len(labels)} labels, the model gives {classes} scores")

    def classify(self, image: Image, top_k: int) -> list[Label]:
        recipe = self._recipe
        square = cropped(image, recipe.resize, recipe.size, recipe.filter)
        output = self._session.run(None, {self._input: tensor(square, recipe.mean, recipe.deviation)})[0]
        scores = activated(np.asarray(output, np.float32).reshape(-1), recipe.activation)
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [Label(int(i), self._labels[i], float(scores[i])) for i in best]


def activated(scores: Floats, activation: str) -> Floats:
    """Turn raw scores of one image into probabilities."""
    if activation == "none":
        return scores
    if activation == "sigmoid":
        return np.float32(1) / (np.float32(1) + np.exp(-scores))
    powers = np.exp(scores - scores.max())
    shares: Floats = powers / powers.sum()
    return shares


def read_labels(file: Path) -> list[str]:
    """Return the lines of a labels file without empty ones at its end; raises LoadFailed where it is no text."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise LoadFailed(f"{file} is not UTF-8 text: {error}") from error
    while lines and not lines[-1]:
        lines.pop()
    return lines
