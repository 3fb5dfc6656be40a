"""Names of tasks, parts and their files."""

from __future__ import annotations

import pytest

from pagein.catalog.split.names import file_name, fold, is_name, part_of_file

TRICKS = {
    "empty": "",
    "a folder up": "..",
    "the folder itself": ".",
    "a path": "a/b",
    "a path of the other kind": "a\\b",
    "an absolute path": "/etc/passwd",
    "a path in dots": "../summarize",
    "a hidden name": ".summarize",
    "a NUL": "summarize\0.txt",
    "a line end": "summarize\n",
    "a space": "sum marize",
    "a long s, which Unicode folds to s": "ſummarize",
    "a Kelvin sign, which Unicode folds to k": "tas\u212a",
    "a dotless i": "summarıze",
    "a Cyrillic a": "summ\u0430rize",
    "full width": "ｓｕｍ",
    "a combining mark": "summarize\u0301",
    "text from right to left": "\u202eeziram",
    "a zero width": "sum\u200bmarize",
    "65 letters": "a" * 65,
    "percent": "sum%2fmarize",
    "a number": 7,
    "nothing": None,
    "bytes": b"summarize",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_are_no_names(trick):
    """Whatever is not plainly a name is none, and is never made one by folding."""
    assert fold(TRICKS[trick]) is None
    assert not is_name(TRICKS[trick])


def test_case_is_folded():
    """A request may write a task in any case; a plan has it in one."""
    assert fold("SumMarize-2.A_b") == "summarize-2.a_b"
    assert fold("a" * 64) == "a" * 64
    assert is_name("summarize")
    assert not is_name("Summarize")


def test_a_file_is_named_after_part_and_content():
    """Name and content give the file's name, and the name gives both back."""
    name = file_name("tag-2", "0123456789abcdef" * 4)
    assert name == "tag-2-0123456789ab.safetensors"
    assert part_of_file(name) == ("tag-2", "0123456789ab")
    for other in ("tag.safetensors", "tag-0123456789AB.safetensors", "tag-0123456789ab.bin", f"{name}\n", f"x/{name}"):
        assert part_of_file(other) is None
