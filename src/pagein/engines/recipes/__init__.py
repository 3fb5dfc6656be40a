"""Recipes: the pre- and post-processing of model families for the onnx engine, found by name.

A new family is a new file here and a line in `RECIPES`; the engine does not change.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module

from pagein.engines.options import read_options
from pagein.engines.recipes.contract import Recipe
from pagein.errors import ConfigError

RECIPES: dict[str, str] = {
    "embedding": "pagein.engines.recipes.embedding:Embedding",
    "sparse_rerank": "pagein.engines.recipes.sparse_rerank:SparseRerank",
    "classification": "pagein.engines.recipes.classification:Classification",
    "saliency": "pagein.engines.recipes.saliency:Saliency",
    "moonshine": "pagein.engines.recipes.moonshine:Moonshine",
}
"""Name → ``module:class``; imported when it is used, so that choosing one loads only what it needs."""


def find_recipe(name: str | None, options: Mapping[str, object], model: str) -> Recipe:
    """Return a recipe with its options set; raises ConfigError for an unknown name or option."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name or "", RECIPES, 1)
        what = f"there is no recipe {name!r}" if name else "an ONNX model needs a recipe"
        meant = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(RECIPES)}"
        raise ConfigError(f"model {model!r}: {what}; {meant}", model=model)
    module, _, attribute = RECIPES[name].partition(":")
    cls: type[Recipe] = getattr(import_module(module), attribute)
    return read_options(cls, options, model)
