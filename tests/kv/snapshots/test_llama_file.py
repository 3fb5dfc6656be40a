"""Reading the head of a slot file."""

from __future__ import annotations

import struct

import pytest

from pagein.errors import SlotRefused
from pagein.kv.snapshots.llama_file import read_slot_file

MARK = 0xFFFFFFFF
CELLS = b"cells" * 20


def slot_file(path, words, magic=b"qsgg", version=4, count=None):
    """Write a file as llama.cpp does."""
    head = magic + struct.pack("<II", version, len(words) if count is None else count)
    path.write_bytes(head + struct.pack(f"<{len(words)}I", *words) + CELLS)
    return path


def test_the_tokens_of_a_new_server_are_read(tmp_path):
    """They stand between a mark with their number and the number of media chunks."""
    file = read_slot_file(slot_file(tmp_path / "f", [MARK, 1, 3, 7, 8, 9, 0]))
    assert (file.tokens, file.has_media, file.version) == ((7, 8, 9), False, 4)
    assert file.bytes == 12 + 7 * 4 + len(CELLS)


def test_the_tokens_of_an_old_server_are_read(tmp_path):
    """They are the words themselves."""
    assert read_slot_file(slot_file(tmp_path / "f", [7, 8, 9], version=2)).tokens == (7, 8, 9)


@pytest.mark.parametrize("words", [[], [MARK, 1, 0, 0]])
def test_an_empty_slot_has_no_tokens(tmp_path, words):
    """llama.cpp writes a file for it all the same."""
    assert read_slot_file(slot_file(tmp_path / "f", words)).tokens == ()


def test_media_are_told(tmp_path):
    """A picture's place is no token, so such a file cannot be found by its tokens."""
    assert read_slot_file(slot_file(tmp_path / "f", [MARK, 1, 2, 7, 8, 1, 99])).has_media


@pytest.mark.parametrize(
    ("words", "given", "told"),
    [([1, 2], {"magic": b"ggml"}, "begins with"), ([1, 2], {"count": 10**6}, "names 1000000 tokens"),
     ([1, 2], {"count": 2**32 - 1}, "names 4294967295 tokens"), ([MARK, 2, 1, 7, 0], {}, "unknown kind"),
     ([MARK, 1, 9, 7, 0], {}, "unknown kind"), ([MARK], {}, "unknown kind")],
)  # fmt: skip
def test_what_llama_cpp_did_not_write_is_refused(tmp_path, words, given, told):
    """With the numbers, and before anything is allocated for them."""
    with pytest.raises(SlotRefused, match=told):
        read_slot_file(slot_file(tmp_path / "f", words, **given))


@pytest.mark.parametrize("length", range(0, 24, 3))
def test_a_torn_head_is_refused(tmp_path, length):
    """A crash in a save leaves a short file."""
    path = slot_file(tmp_path / "f", [MARK, 1, 3, 7, 8, 9, 0])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(SlotRefused):
        read_slot_file(path)
