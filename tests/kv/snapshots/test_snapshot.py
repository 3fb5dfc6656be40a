"""The container: written whole or not at all, and never believed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.errors import SnapshotDamaged
from pagein.kv.snapshots.header import Header, digest_tokens, pack_tokens
from pagein.kv.snapshots.reader import SnapshotReader
from pagein.kv.snapshots.snapshot import MAGIC, PREAMBLE, container_bytes, snapshot_id, write_snapshot
from pagein.kv.snapshots.treehash import BLOCK
from tests.kv.snapshots.build import drafts, offer, payload_of

TOKENS = [5, 0, 4294967295, 7, 7]


def write(folder, tokens=TOKENS, size=1000, payload=None, **fields):
    header, packed = offer(tokens, size, **fields).header(12.5, size)
    path = folder / f"{snapshot_id(header)}.kv"
    write_snapshot(path, header, packed, payload if payload is not None else payload_of(tokens, size))
    return path, header


def sections(path):
    """Start and end of each section of a snapshot, by name."""
    data = path.read_bytes()
    length = PREAMBLE.unpack_from(data)[2]
    header = json.loads(data[16 : 16 + length])
    tokens_at = 16 + length + 32
    payload_at = tokens_at + 4 * header["tokens"]
    end = payload_at + header["payload_bytes"]
    return {
        "magic": (0, 8),
        "version": (8, 12),
        "header length": (12, 16),
        "header": (16, 16 + length),
        "header digest": (16 + length, tokens_at),
        "tokens": (tokens_at, payload_at),
        "payload": (payload_at, end),
        "payload digest": (end, end + 32),
        "seal": (end + 32, end + 64),
    }


def read(path):
    with SnapshotReader(path) as reader:
        return b"".join(reader.chunks())


def test_what_was_written_comes_back(tmp_path):
    """Header, tokens and payload are read as they were written, under the id of the header."""
    path, header = write(tmp_path, conversation="c", facts={"n_past": 5, "v": 1.5, "w": None, "x": True, "y": "z"})
    with SnapshotReader(path) as reader:
        assert reader.header == header
        assert reader.tokens == TOKENS
        assert reader.id == path.stem
        assert b"".join(reader.chunks()) == b"".join(payload_of(TOKENS))
        assert reader.bytes == container_bytes(header) == path.stat().st_size


def test_only_the_owner_may_read(tmp_path):
    """Files are made 0600 whatever the process's mask says, the handed-over payload, too."""
    old = os.umask(0)
    try:
        path, _ = write(tmp_path)
        with SnapshotReader(path) as reader:
            reader.copy_payload(tmp_path / "slot.bin")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "slot.bin").stat().st_mode) == 0o600


def test_a_payload_may_be_a_file(tmp_path):
    """An engine's own file goes in as it is, and comes out as it was."""
    source = tmp_path / "slot.bin"
    source.write_bytes(os.urandom(2 * BLOCK + 17))
    path, _ = write(tmp_path, size=2 * BLOCK + 17, payload=source)
    with SnapshotReader(path) as reader:
        reader.copy_payload(tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "name",
    ["magic", "version", "header length", "header", "header digest", "tokens", "payload", "payload digest", "seal"],
)
def test_a_flipped_byte_in_any_section_is_found(tmp_path, name):
    """First, middle and last byte of each section: no byte of the payload comes out (scenario 5)."""
    path, _ = write(tmp_path)
    whole = path.read_bytes()
    start, end = sections(path)[name]
    for at in (start, (start + end) // 2, end - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(SnapshotDamaged):
            read(path)


def test_a_shortened_or_longer_file_is_found(tmp_path):
    """Truncated at many lengths, each section's edges among them, or with bytes after its end (scenario 5)."""
    path, _ = write(tmp_path)
    whole = path.read_bytes()
    edges = {edge for pair in sections(path).values() for edge in pair}
    lengths = {0, 1, len(whole) // 2, len(whole) - 1} | {max(edge - 1, 0) for edge in edges} | edges
    for length in lengths - {len(whole)}:
        path.write_bytes(whole[:length])
        with pytest.raises(SnapshotDamaged):
            read(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(SnapshotDamaged, match=r"has \d+ bytes, its header says \d+"):
        read(path)


def test_parts_of_two_snapshots_do_not_stand_together(tmp_path):
    """A payload with its digest from another snapshot of the same size is refused."""
    one, _ = write(tmp_path, tokens=[1, 2])
    other, _ = write(tmp_path, tokens=[1, 3])
    start, end = sections(one)["payload"][0], sections(one)["payload digest"][1]
    mixed = one.read_bytes()[:start] + other.read_bytes()[start:end] + one.read_bytes()[end:]
    one.write_bytes(mixed)
    with pytest.raises(SnapshotDamaged, match="seal"):
        read(one)


def test_a_damaged_payload_is_never_handed_over(tmp_path):
    """Neither the target nor a draft of it is left, and what stood under its name stands."""
    path, _ = write(tmp_path, size=3 * BLOCK)
    at = sections(path)["payload"][1] - 1
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)
    target = tmp_path / "slot.bin"
    target.write_bytes(b"before")
    with SnapshotReader(path) as reader, pytest.raises(SnapshotDamaged, match="payload"):
        reader.copy_payload(target)
    assert target.read_bytes() == b"before"
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("size", [999, 1001])
def test_a_payload_of_another_length_is_not_written(tmp_path, size):
    """An engine that writes more or less than it said leaves nothing."""
    with pytest.raises(SnapshotDamaged, match="1000 were declared"):
        write(tmp_path, size=1000, payload=[b"x" * size])
    assert list(tmp_path.iterdir()) == []


def test_a_payload_that_breaks_off_is_not_written(tmp_path):
    """What the source raises passes through, and nothing is left."""

    def broken():
        yield b"x" * 10
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        write(tmp_path, payload=broken())
    assert list(tmp_path.iterdir()) == []


def test_links_and_pipes_are_not_read(tmp_path):
    """A link, a folder, a pipe in a snapshot's place is damage, and does not block."""
    path, _ = write(tmp_path)
    (tmp_path / "link.kv").symlink_to(path)
    (tmp_path / "folder.kv").mkdir()
    os.mkfifo(tmp_path / "pipe.kv")
    for name in ("link.kv", "folder.kv", "pipe.kv"):
        with pytest.raises(SnapshotDamaged):
            SnapshotReader(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        SnapshotReader(tmp_path / "missing.kv")


def test_a_huge_length_costs_no_memory(tmp_path):
    """Lengths are checked against their limit and the file before anything is allocated."""
    path = tmp_path / "x.kv"
    path.write_bytes(PREAMBLE.pack(MAGIC, 1, 2**32 - 1) + b"x" * 100)
    with pytest.raises(SnapshotDamaged, match="limit"):
        SnapshotReader(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 2**40},
        {"tokens": -1},
        {"tokens": 5.0},
        {"payload_bytes": 2**60},
        {"payload_bytes": True},
        {"created": "now"},
        {"conversation": 7},
        {"conversation": ""},
        {"whole_only": 1},
        {"seconds_saved": []},
        {"facts": {"a": []}},
        {"facts": {str(i): 1 for i in range(65)}},
        {"fingerprint": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_forged_header_is_refused(tmp_path, change):
    """A header with right digests but wrong fields is damage all the same."""
    _, header = write(tmp_path)
    forged = json.dumps({**json.loads(header.encode()), **change}, sort_keys=True, separators=(",", ":")).encode()
    start = PREAMBLE.pack(MAGIC, 1, len(forged)) + forged
    path = tmp_path / "forged.kv"
    path.write_bytes(start + hashlib.sha256(start).digest() + b"\0" * 2000)
    with pytest.raises(SnapshotDamaged):
        SnapshotReader(path)


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b"[" * 100_000, b"NaN", b"\xff", b"1", b"1" * 5000])
def test_a_header_that_is_no_object_is_refused(text):
    """Keys that come twice, nesting without end, NaN and other JSON are a ValueError, nothing else."""
    with pytest.raises(ValueError, match="header"):
        Header.decode(text)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"]])
def test_token_ids_are_32_bit_numbers(tokens):
    """What no tokenizer gives is refused with a ValueError."""
    with pytest.raises(ValueError, match="32 bits"):
        pack_tokens(tokens)


def test_token_ids_are_little_endian():
    """The format is the same on every machine."""
    assert pack_tokens([1, 258]) == struct.pack("<II", 1, 258)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=50),
    chunks=st.lists(st.binary(max_size=200), max_size=20),
    conversation=st.none() | st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    facts=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=10), st.none() | st.booleans() | st.integers(-9, 9), max_size=5
    ),
)
def test_any_content_survives(tmp_path_factory, tokens, chunks, conversation, facts):
    """Whatever is written in whatever chunks is read back the same."""
    folder = tmp_path_factory.mktemp("any")
    whole = b"".join(chunks)
    path, header = write(folder, tokens, len(whole), iter(chunks), conversation=conversation, facts=facts)
    with SnapshotReader(path) as reader:
        assert (reader.header, reader.tokens) == (header, tokens)
        assert reader.header.tokens_digest == digest_tokens(pack_tokens(tokens))
        assert b"".join(reader.chunks()) == whole


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_is_found(tmp_path_factory, data):
    """Any byte changed, any piece cut out, doubled or put in: the payload does not come out."""
    folder = tmp_path_factory.mktemp("changed")
    path, _ = write(folder, size=300)
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(start, min(start + 40, len(whole))))
    changed = whole[:start] + data.draw(st.binary(max_size=40)) + whole[end:]
    path.write_bytes(changed)
    if changed == whole:
        assert read(path) == b"".join(payload_of(TOKENS, 300))
    else:
        with pytest.raises(SnapshotDamaged):
            read(path)


def test_a_large_payload_is_never_whole_in_memory(tmp_path):
    """Writing, verifying and handing over 48 MiB holds a few blocks at a time."""
    size = 48 * BLOCK
    source = tmp_path / "slot.bin"
    with source.open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        path, _ = write(tmp_path, size=size, payload=source)
        with SnapshotReader(path) as reader:
            reader.copy_payload(tmp_path / "back.bin")
            assert sum(len(chunk) for chunk in reader.chunks()) == size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * BLOCK
