"""State that is no KV, as bytes: everything comes back, other bytes are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.kv.cache.side import SideUnknown, pack_side, side_bytes, unpack_side


class Layer:
    """A layer with all kinds of values that transformers' layers have."""

    def __init__(self, filled: bool = False) -> None:
        self.device = torch.device("cpu") if filled else None
        self.states = {0: torch.arange(6.0).view(2, 3).to(torch.bfloat16) if filled else None, 1: None}
        self.ready = {0: filled, 1: False}
        self.pair = (torch.ones(2), [3, None]) if filled else ()
        self.dtype = torch.bfloat16 if filled else None
        self.count = 7 if filled else 0
        self.empty = torch.empty(0) if filled else None


def test_round_trip():
    """Tensors of any dtype, dicts with numbers as keys, tuples, lists, dtypes and plain values come back."""
    layers, fresh = [Layer(True), Layer()], [Layer(), Layer()]
    unpack_side(pack_side(layers), fresh, "cpu")
    assert torch.equal(fresh[0].states[0], layers[0].states[0])
    assert fresh[0].states[0].dtype is torch.bfloat16
    assert (fresh[0].ready, fresh[0].count, fresh[0].dtype) == ({0: True, 1: False}, 7, torch.bfloat16)
    assert torch.equal(fresh[0].pair[0], torch.ones(2))
    assert fresh[0].pair[1] == [3, None]
    assert fresh[0].device == torch.device("cpu")
    assert fresh[1].device is None
    assert side_bytes(layers) == 6 * 2 + 2 * 4


def test_unknown_values_are_refused():
    """What bytes cannot hold here is never kept, rather than kept in part."""
    layer = Layer()
    layer.count = object()  # type: ignore[assignment]
    with pytest.raises(SideUnknown):
        pack_side([layer])


def test_other_bytes_are_refused():
    """Bytes of other layers, cut short or of something else raise, and change nothing."""
    flat = pack_side([Layer(True)])
    for wrong, layers in (
        (flat, [Layer(), Layer()]),
        (flat[:-4], [Layer()]),
        (flat[3:], [Layer()]),
        (flat[:5], [Layer()]),
    ):
        with pytest.raises(SideUnknown):
            unpack_side(wrong, layers, "cpu")
        assert layers[0].count == 0
