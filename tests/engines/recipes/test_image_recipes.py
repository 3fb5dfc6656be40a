"""Classification and saliency: what the model sees of an image, and how its output is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pagein.engines.recipes.classification import Classification, activated
from pagein.engines.recipes.contract import Place
from pagein.engines.recipes.pixels import cropped, padded, tensor
from pagein.engines.recipes.saliency import Saliency, summed_up
from pagein.errors import ConfigError, LoadFailed
from tests.engines.recipes.fakes import FakeSession, Value, opener


def classifier(scores: list[float], side: object = 8) -> FakeSession:
    """A session that gives these scores for any image."""
    return FakeSession(
        [Value("image", [1, 3, side, side])],
        [Value("logits", [1, len(scores)])],
        lambda feed: [np.array([scores], np.float32)],
    )


def labelled(folder: Path, *labels: str) -> Place:
    """A place with a labels file."""
    (folder / "labels.txt").write_text("\n".join(labels) + "\n\n")
    return Place("m", folder / "model.onnx")


def test_labels_come_best_first_with_their_shares(tmp_path: Path):
    """Scores become shares by softmax; top_k cuts the list."""
    place = labelled(tmp_path, "cup", "cat", "tripod")
    model = Classification(size=8, resize=9).build(place, opener(classifier([0.0, 2.0, 1.0])))
    found = model.classify(Image.new("RGB", (20, 10)), 2)
    shares = np.exp([0, 2, 1]) / np.exp([0, 2, 1]).sum()
    assert [(label.index, label.label) for label in found] == [(1, "cat"), (2, "tripod")]
    assert np.allclose([label.score for label in found], [shares[1], shares[2]])


def test_pixels_are_scaled_as_declared(tmp_path: Path):
    """(pixel − mean) / deviation, channels first; one number stands for all three channels."""
    fake = classifier([0.0])
    options = {"size": 8, "resize": 8, "mean": [10.0, 20.0, 30.0], "deviation": 2.0}
    model = Classification(**options).build(labelled(tmp_path, "a"), opener(fake))
    model.classify(Image.new("RGB", (8, 8), (12, 20, 10)), 1)
    seen = fake.feeds[0]["image"]
    assert seen.shape == (1, 3, 8, 8)
    assert seen.dtype == np.float32
    assert [channel.mean() for channel in seen[0]] == [1.0, 0.0, -10.0]


@pytest.mark.parametrize(("labels", "words"), [(["a"], "1 labels, the model gives 2"), (["a", "b", "c"], "3 labels")])
def test_labels_must_match_the_scores(tmp_path: Path, labels, words):
    """A labels file of another length is refused at load, with both numbers."""
    with pytest.raises(LoadFailed, match=words):
        Classification(size=8, resize=8).build(labelled(tmp_path, *labels), opener(classifier([0.0, 1.0])))


def test_the_models_input_must_match_the_size(tmp_path: Path):
    """A model made for another size is refused at load; one of any size is not."""
    with pytest.raises(LoadFailed, match=r"3 × 16 × 16; the model has image \[1, 3, 8, 8\]"):
        Classification(size=16, resize=16).build(labelled(tmp_path, "a"), opener(classifier([0.0])))
    Classification(size=16, resize=16).build(labelled(tmp_path, "a"), opener(classifier([0.0], "side")))


@pytest.mark.parametrize("options", [{"size": 9, "resize": 8}, {"deviation": 0.0}, {"mean": [1.0, 2.0]}])
def test_impossible_options_are_refused(tmp_path: Path, options):
    """Sizes and scales that cannot work are ConfigError with the option's name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Classification(**options).build(labelled(tmp_path, "a"), opener(classifier([0.0])))


def test_activations():
    """Softmax of large scores does not overflow; sigmoid is per class; none leaves scores alone."""
    assert np.allclose(activated(np.array([1000, 1000], np.float32), "softmax"), [0.5, 0.5])
    assert np.allclose(activated(np.array([0, 100], np.float32), "sigmoid"), [0.5, 1.0])
    assert activated(np.array([3], np.float32), "none").tolist() == [3]


def test_the_crop_is_the_middle():
    """Of a wide image the model sees the middle square, scaled by the shorter side."""
    image = Image.new("RGB", (400, 100), "black")
    image.paste("white", (150, 0, 250, 100))
    square = np.asarray(cropped(image, 10, 10, "box"))
    assert square.shape == (10, 10, 3)
    assert (square == 255).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 3), (223, 224)])
def test_any_shape_of_image_can_be_cropped_and_padded(size):
    """Images far smaller or thinner than the model's square are taken."""
    image = Image.new("RGB", size)
    assert cropped(image, 256, 224, "bicubic").size == (224, 224)
    assert padded(image, 224, "box")[0].size == (224, 224)


def test_padding_centres_the_image_and_says_where_it_is():
    """A wide image lies in the middle between black bars."""
    square, box = padded(Image.new("RGB", (40, 20), "white"), 8, "box")
    rows = np.asarray(square)[:, 0, 0].tolist()
    assert rows == [0, 0, 255, 255, 255, 255, 0, 0]
    assert (box.left, box.top, box.width, box.height) == (0, 2, 8, 4)


def test_tensor_is_contiguous():
    """Channels first in memory too: onnxruntime would copy otherwise."""
    assert tensor(Image.new("RGB", (4, 2)), 0.0, 1.0).flags.c_contiguous


def test_saliency_leaves_the_padding_out():
    """What the model thinks of the bars around the image neither enters the map nor becomes the peak."""
    values = np.full((8, 8), 5.0, np.float32)
    values[2:6] = 0.0
    values[4, 6] = 1.0
    fake = FakeSession(
        [Value("image", ["n", 3, 8, 8])], [Value("map", ["n", 1, 8, 8])], lambda feed: [values[None, None]]
    )
    model = Saliency(size=8, grid=4).build(Place("m", Path("x.onnx")), opener(fake))
    found = model.saliency(Image.new("RGB", (40, 20)))
    assert found.values.shape == (4, 4)
    assert found.score == 1.0
    assert (found.x, found.y) == ((6 + 0.5) / 8, (2 + 0.5) / 4)
    assert found.values.max() == 0.5


def test_a_model_without_a_value_per_pixel_is_refused():
    """Output of another size is LoadFailed with its shape."""
    fake = FakeSession([Value("image", [1, 3, 8, 8])], [Value("out", [1, 10])], lambda feed: [np.zeros((1, 10))])
    model = Saliency(size=8, grid=4).build(Place("m", Path("x.onnx")), opener(fake))
    with pytest.raises(LoadFailed, match=r"8 × 8 values, the model gives \(1, 10\)"):
        model.saliency(Image.new("RGB", (8, 8)))


def test_the_grid_holds_means():
    """Each cell is the mean of its pixels; sides that do not divide evenly are shared between cells."""
    assert summed_up(np.arange(16, dtype=np.float32).reshape(4, 4), 2).values.tolist() == [[2.5, 4.5], [10.5, 12.5]]
    uneven = summed_up(np.ones((3, 5), np.float32), 2)
    assert np.allclose(uneven.values, 1)
