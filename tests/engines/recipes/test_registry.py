"""Finding recipes and reading their options."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from pagein.engines.recipes import RECIPES, find_recipe
from pagein.engines.recipes.contract import Place, Recipe
from pagein.engines.recipes.embedding import Embedding
from pagein.errors import ConfigError, LoadFailed


@pytest.mark.parametrize("name", RECIPES)
def test_every_listed_recipe_is_a_frozen_declaration(name):
    """Each name leads to a recipe whose options all have defaults and cannot change."""
    recipe = find_recipe(name, {}, "m")
    assert isinstance(recipe, Recipe)
    first = dataclasses.fields(recipe)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(recipe, first, None)


def test_options_replace_defaults():
    """Options from the configuration are set, the others keep their defaults."""
    assert find_recipe("embedding", {"pooling": "cls", "max_tokens": 128}, "m") == Embedding(
        pooling="cls", max_tokens=128
    )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("embeding", {}, "did you mean 'embedding'?"),
        ("zzz", {}, "known: embedding, sparse_rerank"),
        (None, {}, "needs a recipe"),
        ("embedding", {"poling": "cls"}, "did you mean 'pooling'?"),
        ("embedding", {"pooling": "max"}, "mean, cls"),
        ("embedding", {"max_tokens": "many"}, "a whole number"),
        ("classification", {"mean": ["a"]}, "number"),
    ],
)
def test_mistakes_are_named_with_what_is_meant(name, options, words):
    """Unknown recipes and options, and values of the wrong kind, name the nearest known one or what is taken."""
    with pytest.raises(ConfigError) as caught:
        find_recipe(name, options, "mymodel")
    assert words in caught.value.message
    assert "'mymodel'" in caught.value.message


def test_the_model_file_of_a_folder(tmp_path: Path):
    """A folder means its model.onnx, or its only ONNX file; a file means itself."""
    (tmp_path / "a.onnx").touch()
    assert Place("m", tmp_path).model_file().name == "a.onnx"
    (tmp_path / "b.ort").touch()
    with pytest.raises(LoadFailed, match=r"found a\.onnx, b\.ort"):
        Place("m", tmp_path).model_file()
    (tmp_path / "model.onnx").touch()
    assert Place("m", tmp_path).model_file().name == "model.onnx"
    assert Place("m", tmp_path / "b.ort").model_file().name == "b.ort"


def test_a_missing_companion_is_named(tmp_path: Path):
    """A file that a recipe needs beside the model is named with its path when it is not there."""
    with pytest.raises(LoadFailed, match=r"labels\.txt, which is not there"):
        Place("m", tmp_path / "model.onnx").beside("labels.txt")


def test_the_daemons_table_of_options_is_the_same():
    """The names that the catalog knows are the fields of each recipe."""
    from pagein.catalog.option_names import RECIPE_OPTIONS

    own = {name: frozenset(field.name for field in dataclasses.fields(find_recipe(name, {}, "m"))) for name in RECIPES}
    assert own == RECIPE_OPTIONS


def test_the_daemons_table_of_recipes_is_the_same():
    """What the catalog says about recipes, without importing them, is what they build."""
    from pagein.catalog.recipes import RECIPE_CAPABILITIES

    built = {name: typing.get_type_hints(type(find_recipe(name, {}, "m")).build)["return"] for name in RECIPES}
    assert {name: kind.capability for name, kind in built.items()} == RECIPE_CAPABILITIES
