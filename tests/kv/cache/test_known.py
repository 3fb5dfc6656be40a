"""Which blocks are known by content: places follow the arena, and never name other content."""

from __future__ import annotations

from pagein.kv.blocks.keys import BLOCK, chain
from pagein.kv.cache.find import find, side_lengths
from pagein.kv.cache.known import Known

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
