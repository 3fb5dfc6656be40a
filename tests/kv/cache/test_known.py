"""Which blocks are known by content: places follow the arena, and never name other content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.kv.blocks.keys import BLOCK, chain
from pagein.kv.tiers.find import Piece, find, first_block, side_lengths
from pagein.kv.tiers.known import Known

ROOT = bytes(32)


def grown(known: Known, tokens: range | list[int], groups: int = 1, first: int = 0):
    """Name the blocks of a text, at ids from ``first`` on in every group."""
    nodes, parent = [], ROOT
    for at, (key, piece) in enumerate(chain(ROOT, tokens)):
        node = known.add(parent, piece, key)
        assert node is not None
        for group in range(groups):
            known.only(node, group, first + at)
        nodes.append(node)
        parent = key
    return nodes


def held(known: Known, tokens: list[int] | range, windows=(None,), limit: int | None = None, exact=None) -> int:
    return find(known, chain(ROOT, tokens), ROOT, windows, len(tokens) if limit is None else limit, exact).length


def test_longest_prefix():
    """Whole blocks and the beginning of the next one are found; nothing beyond."""
    known = Known(1)
    grown(known, range(200))
    assert held(known, range(200)) == 200
    assert held(known, [*range(150), 999, 998]) == 150
    assert held(known, range(200), limit=199) == 199
    assert held(known, [7, *range(1, 200)]) == 0


def test_other_parents_are_other_blocks():
    """The same tokens behind another beginning are another block."""
    known = Known(1)
    grown(known, range(128))
    assert held(known, [9, *range(1, 128)]) == 0


def test_freed_blocks_are_unknown():
    """A block that the arena has back is found no more, and neither is what follows it."""
    known = Known(1)
    grown(known, range(192))
    known.freed(0, 1)
    assert held(known, range(192)) == BLOCK
    for block in (0, 2):
        known.freed(0, block)
    assert len(known) == 0


def test_cut_blocks_keep_their_beginning():
    """A block that is written behind its first rows no longer serves as a longer one."""
    known = Known(1)
    grown(known, range(100))
    known.cut(0, 1, 36)
    assert held(known, range(100)) == 100
    known.cut(0, 1, 20)
    assert held(known, range(100)) == BLOCK


def test_moved_blocks_are_found():
    """Blocks that were moved are found where they are, two that changed places included."""
    known = Known(1)
    nodes = grown(known, range(128))
    known.moved(0, {0: 1, 1: 0})
    assert [node.device[0] for node in nodes] == [1, 0]


def test_longer_names_replace_shorter():
    """A tail that grew is named by its longest content only."""
    known = Known(1)
    grown(known, range(70))
    grown(known, range(90))
    assert held(known, range(90)) == 90
    assert len(known) == 2


def test_windows_need_their_window_only():
    """A group with a window needs the blocks of the window before the length, the others all."""
    known = Known(2)
    grown(known, range(320), groups=2)
    for block in (0, 1, 2):
        known.freed(1, block)
    assert held(known, range(320), (None, 65)) == 320
    assert held(known, range(320), (None, 129)) == 320
    assert held(known, range(320), (None, 130)) == 0


def test_shorter_window_prefix():
    """Where the window before the longest length is not whole, a shorter prefix serves."""
    known = Known(2)
    grown(known, range(320), groups=2)
    known.freed(1, 4)
    assert held(known, range(320), (None, 65)) == 256


def test_side_state_only_at_its_length():
    """With side state only lengths that it was kept at will do."""
    known = Known(1)
    nodes = grown(known, range(150))
    nodes[1].side = 7
    lengths = side_lengths(known, chain(ROOT, range(150)), ROOT)
    assert list(lengths) == [128]
    assert held(known, range(150), exact=lengths) == 128
    assert held(known, range(150), exact=()) == 0


def test_collision_is_a_miss():
    """A key that stands for other tokens is no hit and takes no place."""
    known = Known(1)
    key = chain(ROOT, range(64))[0][0]
    assert known.add(ROOT, list(range(64)), key) is not None
    assert known.add(ROOT, list(range(1, 65)), key) is None
    assert find(known, [(key, tuple(range(1, 65)))], ROOT, (None,), 64).length == 0


def test_path_to_the_root():
    """The nodes before a block are known as long as it is."""
    known = Known(1)
    nodes = grown(known, range(192))
    known.freed(0, 0)
    assert known.path(nodes[2]) == (nodes, ROOT)


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.data())
def test_found_as_a_plain_search_finds_it(data: st.DataObject):
    """Whatever lies where, in groups with and without windows: the longest prefix that all of them can serve."""
    windows = tuple(data.draw(st.lists(st.sampled_from([None, 2, 65, 100, 129, 300]), min_size=1, max_size=3)))
    said = data.draw(st.integers(1, 7)) * BLOCK - data.draw(st.integers(0, BLOCK - 1))
    known = Known(len(windows))
    grown(known, range(said), len(windows))
    known.add(ROOT, [1, 2, 3])  # lies nowhere
    for group in range(len(windows)):
        for block in data.draw(st.sets(st.integers(0, 6), max_size=4)):
            known.freed(group, block)
    asked = [*range(data.draw(st.integers(1, 450))), *data.draw(st.lists(st.just(-1), max_size=3))]
    limit = data.draw(st.integers(1, len(asked)))
    lies = [[at for at in range(7) if known_at(known, said, at, group)] for group in range(len(windows))]
    common = min(limit, len([one for one in asked if one >= 0]), said)

    def serves(length: int) -> bool:
        return all(
            at in lies[group]
            for group, window in enumerate(windows)
            for at in range(first_block(length, window), -(-length // BLOCK))
        )

    # What begins otherwise within a block serves as far as it is alike; lengths within a block need the same blocks.
    want = next((length for length in range(common, 0, -1) if serves(length)), 0)
    found = find(known, chain(ROOT, asked), ROOT, windows, limit)
    ends = {want, want // BLOCK * BLOCK}
    assert found.length in ends or all(window is not None for window in windows)
    assert found.length <= want
    assert want == 0 or found.length > want - BLOCK
    for pieces, window in zip(found.pieces, windows, strict=True):
        wanted = range(first_block(found.length, window), -(-found.length // BLOCK)) if found.length else ()
        assert [piece.index for piece in pieces] == list(wanted)


def known_at(known: Known, said: int, at: int, group: int) -> bool:
    """Tell whether a block of a text lies on the device."""
    links = chain(ROOT, range(said))
    node = known.get(links[at][0]) if at < len(links) else None
    return node is not None and node.device[group] is not None


def test_a_long_text_with_windows_is_found_by_one_look_at_each_block(monkeypatch: pytest.MonkeyPatch):
    """Where the window holds nothing useful, no length is tried by listing its blocks; what is found is listed once."""
    known = Known(2)
    grown(known, range(BLOCK * 200), groups=2)
    for block in range(3, 200):
        known.freed(1, block)
    made = []

    class Counting(Piece):
        def __init__(self, *fields):
            made.append(fields)
            super().__init__(*fields)

    monkeypatch.setattr("pagein.kv.tiers.find.Piece", Counting)
    assert held(known, range(BLOCK * 200), (None, 130)) == BLOCK * 3
    assert len(made) == 3 + 3
