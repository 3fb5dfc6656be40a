"""Keys of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.kv.blocks.keys import BLOCK, ROOT_FIELDS, chain, common_length, next_key, root_key

FIELDS = dict.fromkeys(ROOT_FIELDS, "")


@pytest.mark.parametrize("name", sorted(ROOT_FIELDS))
def test_every_field_tells_roots_apart(name: str) -> None:
    """Whatever computed otherwise, or belongs to somebody else, is never found under the same key."""
    assert root_key({**FIELDS, name: "other"}) != root_key(FIELDS)


def test_fields_cannot_run_into_each_other() -> None:
    """A text that contains another field's name or value is not mistaken for it: lengths stand before texts."""
    one = root_key({**FIELDS, "adapter": "salt", "tenant": ""})
    other = root_key({**FIELDS, "adapter": "", "tenant": "salt"})
    assert one != other
    assert root_key({**FIELDS, "tenant": "ab", "x": "c"}) != root_key({**FIELDS, "tenant": "a", "x": "bc"})


def test_a_root_lacks_no_field() -> None:
    """A fingerprint that forgets the tenant is refused by name."""
    with pytest.raises(ValueError, match="tenant"):
        root_key(dict.fromkeys(ROOT_FIELDS - {"tenant"}, ""))


def test_order_of_fields_is_nothing() -> None:
    """The same fields in another order are the same root."""
    assert root_key(dict(reversed(FIELDS.items()))) == root_key(FIELDS)


@given(st.lists(st.integers(0, 2**40), max_size=200), st.lists(st.integers(0, 2**40), max_size=200))
def test_chains_agree_exactly_as_far_as_their_blocks(one: list[int], other: list[int]) -> None:
    """Two texts have keys in common for the blocks that begin both, and no others."""
    root = root_key(FIELDS)
    mine, theirs = chain(root, one), chain(root, other)
    assert [token for _, piece in mine for token in piece] == one
    assert all(len(piece) == BLOCK for _, piece in mine[:-1])
    for at, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        same = one[: at * BLOCK + len(left[1])] == other[: at * BLOCK + len(right[1])]
        assert (left[0] == right[0]) == same


def test_a_partial_block_is_not_the_whole_one() -> None:
    """The length is part of a key."""
    root = root_key(FIELDS)
    assert next_key(root, [0]) != next_key(root, [0, 0])


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_length_is_the_longest_common_beginning(one: list[int], other: list[int]) -> None:
    """It says how many tokens two texts begin with alike."""
    length = common_length(one, other)
    assert one[:length] == other[:length]
    assert one[: length + 1] != other[: length + 1] or length == min(len(one), len(other))
