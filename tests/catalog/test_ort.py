"""ORT flat buffers: told by their identifier, checked at the root."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pagein.catalog.ort import is_ort, read_ort
from pagein.errors import BadModelFile
from tests.catalog.build import ort, write


def test_reads_the_format_version(tmp_path: Path) -> None:
    """Identifier, root and version are read; the size is the file's."""
    header = read_ort(write(tmp_path / "m.ort", ort(b"6")))
    assert header.format_version == "6"
    assert header.size == len(ort(b"6"))
    assert is_ort(ort())


GOOD = ort()
WRONG = {
    "another identifier": GOOD[:4] + b"TFL3" + GOOD[8:],
    "a root past the end": struct.pack("<I", 10_000) + GOOD[4:],
    "a field list before the file": GOOD[:16] + struct.pack("<i", 10_000) + GOOD[20:],
    "a crooked field list": GOOD[:8] + struct.pack("<H", 7) + GOOD[10:],
    "no version": GOOD[:12] + struct.pack("<H", 0) + GOOD[14:],
    "a field outside its table": GOOD[:12] + struct.pack("<H", 60) + GOOD[14:],
    "a long version": ort(b"6" * 100),
    "a model past the end": GOOD[:24] + struct.pack("<I", 2**31) + GOOD[28:],
    "a cut": GOOD[:18],
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(tmp_path: Path, case: str) -> None:
    """Each fault is a BadModelFile."""
    with pytest.raises(BadModelFile):
        read_ort(write(tmp_path / "m.ort", WRONG[case]))
