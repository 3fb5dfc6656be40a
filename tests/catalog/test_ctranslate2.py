"""CTranslate2's model.bin."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.catalog.ctranslate2 import is_ctranslate2, read_ctranslate2
from pagein.errors import BadModelFile
from tests.catalog.build import ctranslate2, write


def test_reads_variables(tmp_path: Path) -> None:
    """Variables are added up by type, the telling shapes kept, aliases stepped over."""
    variables = [("encoder/conv1/weight", (8, 2, 3), 4, 2), ("b", (5,), 1, 1)]
    data = ctranslate2(variables, aliases=[("c", "b")])
    model = read_ctranslate2(write(tmp_path / "model.bin", data))
    assert model.specification == "WhisperSpec"
    assert (model.parameters, model.weight_bytes) == (53, 101)
    assert model.bytes_by_type == {"float16": 96, "int8": 5}
    assert model.shapes == {"encoder/conv1/weight": (8, 2, 3)}
    assert is_ctranslate2(data[:128])


WRONG = {
    "an old version": (ctranslate2(version=2), "binary version 2"),
    "a new version": (ctranslate2(version=9), "binary version 9"),
    "a wrong size": (ctranslate2(size_error=4), "takes 80 bytes, it has 84"),
    "an unknown type": (ctranslate2([("a", (2,), 9, 1)]), "unknown type 9"),
    "many dimensions": (ctranslate2([("a", (1,) * 9, 1, 1)]), "9 dimensions, the limit is 8"),
    "a variable twice": (ctranslate2([("a", (1,), 1, 1), ("a", (1,), 1, 1)]), "'a' comes twice"),
    "an alias of nothing": (ctranslate2(aliases=[("x", "y")]), "'y', which does not exist"),
    "bytes at the end": (ctranslate2() + b"abc", "ends at byte"),
    "a cut": (ctranslate2()[:-90], "the file has"),
    "a name without its zero": (ctranslate2().replace(b"WhisperSpec\0", b"WhisperSpecs"), "does not end with a zero"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(tmp_path: Path, case: str) -> None:
    """Each fault is a BadModelFile that names the part and the numbers."""
    data, words = WRONG[case]
    with pytest.raises(BadModelFile, match=words):
        read_ctranslate2(write(tmp_path / "model.bin", data))
