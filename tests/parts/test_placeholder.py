"""What stands for a cold weight raises on every use, and answers what needs no bytes."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F

from pagein.errors import NotResident
from pagein.parts.placeholder import again, is_cold, placeholder

pytestmark = pytest.mark.torch


def cold(*shape: int, parameter: bool = True):
    return placeholder(
        "tag", "tag.weight", shape or (4, 4), torch.float32, parameter=parameter, requires_grad=parameter
    )


X = torch.ones(2, 4)
USES = {
    "matmul": lambda w: X @ w,
    "reflected matmul": lambda w: torch.matmul(w, X.T),
    "linear without bias": lambda w: F.linear(X, w),
    "linear of three dimensions": lambda w: F.linear(X[None], w),
    "linear with a real bias": lambda w: F.linear(X, w, torch.ones(4)),
    "addmm": lambda w: torch.addmm(torch.ones(4), X, w),
    "conv1d": lambda w: F.conv1d(torch.ones(1, 4, 4), w[:, :, None]),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "embedding bag": lambda w: F.embedding_bag(torch.tensor([[1]]), w),
    "layer norm": lambda w: F.layer_norm(X, (4,), w),
    "einsum": lambda w: torch.einsum("ab,bc->ac", X, w),
    "aten": lambda w: torch.ops.aten.mm(X, w),
    "index": lambda w: w[0],
    "add in place": lambda w: X.clone().add_(w),
    "copy from": lambda w: X.clone().copy_(w),
    "copy into": lambda w: w.copy_(torch.ones(4, 4)),
    "fill": lambda w: w.zero_(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.float16),
    "type of another kind": lambda w: w.type(torch.float16),
    "view": lambda w: w.view(16),
    "transpose": lambda w: w.T,
    "numpy": lambda w: w.numpy(),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w.item(),
    "truth": bool,
    "iteration": list,
    "equality": lambda w: w == w,
    "stack": lambda w: torch.stack([w, torch.ones(4, 4)]),
    "concatenation": lambda w: torch.cat((torch.ones(4, 4), w)),
    "like": torch.empty_like,
    "pointer": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
    "pickle": pickle.dumps,
    "parameter of it": lambda w: nn.utils.parameters_to_vector([w]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("parameter", [True, False], ids=["parameter", "buffer"])
def test_every_use_raises(use, parameter):
    """Whatever computes with a cold tensor, or copies it, says which tensor of which task it is (scenario 7)."""
    with pytest.raises(NotResident) as told:
        use(cold(parameter=parameter))
    assert told.value.details == {"task": "tag", "tensor": "tag.weight"}


def test_every_use_raises_without_autograd():
    """Neither no_grad nor inference mode lets a cold tensor through."""
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, pytest.raises(NotResident):
            X @ cold()


def test_attention_does_not_take_its_fast_path():
    """Multi-head attention with a cold projection raises, in its fast path too."""
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        attend = nn.MultiheadAttention(4, 2, batch_first=True).eval()
        path, _, leaf = name.rpartition(".")
        table = attend.get_submodule(path)._parameters
        table[leaf] = cold(*table[leaf].shape)
        with torch.inference_mode(), pytest.raises(NotResident):
            attend(X[None], X[None], X[None], need_weights=False)


def test_what_needs_no_bytes_is_answered():
    """Shape, type, device, size and gradient settings are those of the tensor that is away."""
    one = cold(3, 5)
    assert isinstance(one, nn.Parameter)
    assert (one.shape, one.dtype, one.numel(), one.dim(), len(one)) == (torch.Size((3, 5)), torch.float32, 15, 2, 3)
    assert one.is_meta
    assert one.requires_grad
    assert one.is_leaf
    assert one.is_floating_point()
    assert one.grad is None
    assert not one.requires_grad_(False).requires_grad
    assert "tag.weight" in repr(one)
    assert "not in memory" in repr(one)
    assert hash(one) == hash(one)


def test_a_copy_is_cold_too():
    """A module with cold weights can be copied; the copy raises as well."""
    layer = nn.Linear(4, 4)
    layer._parameters["weight"] = cold()
    twin = copy.deepcopy(layer)
    assert is_cold(twin.weight)
    assert twin.weight is not layer.weight
    assert twin.weight.requires_grad
    with pytest.raises(NotResident, match=r"tag\.weight"):
        twin(X)
    assert again(layer.weight, torch.float16).dtype is torch.float16


def test_optimizers_can_be_made_over_it():
    """An optimizer is made, and steps, over parameters that are away: there is no gradient, so nothing is changed."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        steps = kind([cold(), nn.Parameter(torch.ones(2))], lr=0.1)
        steps.step()
        steps.zero_grad()
