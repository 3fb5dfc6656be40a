"""PackedLinear stands where an nn.Linear stood, and computes from whatever memory its buffers are given."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from pagein.weights.packed.packed_linear import PackedLinear, packed_like, sides
from pagein.weights.packed.packing import pack, unpack

pytestmark = pytest.mark.torch


def filled(bits: int, bias: bool, dtype: torch.dtype) -> tuple[PackedLinear, torch.Tensor]:
    """A layer whose buffers are views of one flat buffer, as a ring gives them, and its weight."""
    torch.manual_seed(0)
    layer = PackedLinear(192, 256, bits, bias=bias, dtype=dtype, device="meta")
    parts = pack(torch.randn(256, 192) * 0.05, bits, layer.group)
    flat = torch.empty(sum(part.nbytes for part in parts.values()) + 64, dtype=torch.uint8)
    begin = 64
    for name, part in parts.items():
        view = flat[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        layer._buffers[name] = view.copy_(part)
        begin += part.nbytes
    if bias:
        layer.bias = nn.Parameter(torch.randn(256, dtype=dtype), requires_grad=False)
    return layer, unpack(*parts.values(), layer.layout)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(192,), (3, 192), (2, 3, 192), (2, 60, 192), (0, 192)])
def test_forward_of_any_leading_shape(shape, dtype, bias, bits):
    """Activations of any leading shape give what the linear layer with the unpacked weight gives."""
    layer, weight = filled(bits, bias, dtype)
    x = torch.randn(shape).to(dtype)
    found = layer(x)
    wanted = nn.functional.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    assert torch.allclose(found.float(), wanted, atol=0.02 * float(wanted.abs().amax()) if wanted.numel() else 0)


def test_strided_activations():
    """Activations that do not lie in rows are taken too."""
    layer, weight = filled(4, False, torch.float32)
    x = torch.randn(192, 3).t()
    assert torch.allclose(layer(x), x @ weight.t(), atol=0.05)


def test_inference_mode_and_plain_calls_take_turns():
    """Scratch made in inference mode serves calls outside of it, and the other way round."""
    from pagein.weights.packed.packed_matmul import _scratch

    layer, weight = filled(4, False, torch.float32)
    x = torch.randn(100, 192)
    for first in (True, False):
        _scratch.held.clear()
        for inside in (first, not first):
            with torch.inference_mode(inside):
                assert torch.allclose(layer(x), x @ weight.t(), atol=0.05)


def test_gradients_do_not_pass():
    """Activations that want a gradient are taken; what comes out has none."""
    layer, _ = filled(4, False, torch.float32)
    assert not layer(torch.randn(100, 192, requires_grad=True)).requires_grad


def test_weight_is_there_for_who_looks():
    """Code that looks at a layer's weight sees its value, in the model's dtype; on meta its shape."""
    layer, weight = filled(8, False, torch.bfloat16)
    assert torch.equal(layer.weight, weight.bfloat16())
    empty = PackedLinear(192, 256, 4, bias=False, device="meta")
    assert empty.weight.shape == (256, 192)
    assert empty.weight.is_meta


def test_what_can_be_packed():
    """Plain linear layers that are large enough; in the packed layer's place their bias stays the same tensor."""

    class Odd(nn.Linear):
        """Computes in its own way, for all that the swap can know."""

    with torch.device("meta"):
        plain, small, odd = nn.Linear(128, 128), nn.Linear(128, 16), Odd(128, 128)
    assert [sides(one, 4) for one in (plain, small, odd)] == [(128, 128), None, None]
    made = packed_like(plain, 4)
    assert made.bias is plain.bias
    assert all(buffer.is_meta for buffer in made.buffers())


def test_conv1d_is_taken_the_other_way_round():
    """transformers' Conv1D holds [width, rows]; the packed layer in its place has them as a linear layer has."""
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(384, 128)
    assert sides(layer, 4) == (384, 128)
    made = packed_like(layer, 4)
    assert (made.in_features, made.out_features) == (128, 384)


def test_impossible_sizes_are_refused():
    """Bits and groups that do not divide are an error at once."""
    with pytest.raises(ValueError, match="do not divide rows of 100"):
        PackedLinear(100, 128, 4, bias=False)
    with pytest.raises(ValueError, match="3 bits"):
        PackedLinear(128, 128, 3, bias=False)
