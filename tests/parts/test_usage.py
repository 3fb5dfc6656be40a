"""The influence matrix summed up: as deep as it differs, and no longer than a table."""

from __future__ import annotations

from pagein.parts.splitting.rules import Influence, TensorUse
from pagein.parts.splitting.usage import MOST_GROUPS, groups
from tests.parts.found import MIB, influence


def test_a_group_is_a_module_that_is_used_alike():
    """Neighbours that are numbered and used alike are one row; what differs has its own; shares are over samples."""
    rows = {one.name: (one.nbytes // MIB, one.tensors, dict(one.use)) for one in groups(influence())}
    assert rows == {
        "body": (80, 2, {"sum": 1.0, "tag": 1.0}),
        "gate": (1, 1, {"sum": 0.5, "tag": 0.0}),
        "heads.sum": (20, 1, {"sum": 1.0, "tag": 0.0}),
        "heads.tag": (10, 1, {"sum": 0.0, "tag": 1.0}),
        "idle": (2, 1, {"sum": 0.0, "tag": 0.0}),
    }


def test_numbered_modules_are_joined():
    """Layers of one use stand in one row by their first and last number."""
    calls = {"a": 1, "b": 1}
    tensors = {f"layers.{at}.{leaf}": TensorUse(8, calls if at < 4 else {"a": 1}) for at in range(6) for leaf in "wb"}
    found = groups(Influence({"a": 1, "b": 1}, tensors))
    assert [(one.name, one.tensors) for one in found] == [("layers.0-3", 8), ("layers.4-5", 4)]


def test_the_table_is_bounded():
    """Where every tensor differs from its neighbours, modules are summed up by bytes."""
    tensors = {f"l.{at}.{leaf}": TensorUse(8, {"a": 1} if leaf == "w" else {}) for at in range(200) for leaf in "wb"}
    found = groups(Influence({"a": 1}, tensors))
    assert len(found) <= MOST_GROUPS
    assert sum(one.nbytes for one in found) == 200 * 2 * 8
    assert {one.use["a"] for one in found} == {0.5}


def test_tied_names_count_once():
    """Two names of one tensor are one row's bytes, and a use of either is a use."""
    tensors = {"head.w": TensorUse(8, {}), "embed.w": TensorUse(8, {"a": 1})}
    found = groups(Influence({"a": 1}, tensors, (("head.w", "embed.w"),)))
    assert [(one.nbytes, one.tensors, dict(one.use)) for one in found] == [(8, 1, {"a": 1.0})]
