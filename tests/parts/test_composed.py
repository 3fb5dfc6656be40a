"""Several models as one module: what is shared between them, and what only looks as if it could be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pagein.errors import UnknownTask
from pagein.parts.composed import Sharing, TaskModels, same_bits
from pagein.parts.splitting.trace import NamedTensors

pytestmark = pytest.mark.torch


class Wrapped(nn.Module):
    """A backbone under a prefix with a head, as classes of one family are."""

    base_model_prefix = "encoder"

    def __init__(self, backbone: nn.Module, out: int) -> None:
        super().__init__()
        self.encoder = backbone
        self.head = nn.Linear(4, out)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(value))

    def generate(self, value: torch.Tensor) -> torch.Tensor:
        return self(value) + 1


def backbone(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GRU(4, 4))
    return made.eval()


def test_prefixes_of_a_family_do_not_matter() -> None:
    """A backbone alone and the same under a head share every tensor, buffers and recurrent lists included."""
    alone, headed, sharing = backbone(), Wrapped(backbone(), 2), Sharing()
    sharing.add("a", alone)
    sharing.add("b", headed)
    for name, tensor in alone.state_dict(keep_vars=True).items():
        assert headed.state_dict(keep_vars=True)[f"encoder.{name}"] is tensor
    assert headed.encoder[2]._flat_weights[0] is alone[2]._flat_weights[0]
    assert sharing.tensors == len(alone.state_dict())
    assert not sharing.apart
    tied = NamedTensors(TaskModels({"a": alone, "b": headed}, {})).tied
    assert ("models.a.0.weight", "models.b.encoder.0.weight") in tied


def test_equal_bytes_at_other_places_are_chance() -> None:
    """Biases of zero are alike everywhere, and are no reason to tie them."""
    one, other, sharing = nn.Linear(4, 4), Wrapped(nn.Linear(4, 4), 4), Sharing()
    for bias in (one.bias, other.head.bias):
        nn.init.zeros_(bias)
    sharing.add("a", one)
    sharing.add("b", other)
    assert other.head.bias is not one.bias
    assert sharing.tensors == 0
    assert sharing.apart == ["models.b.encoder.weight", "models.b.encoder.bias"]


def test_ties_within_a_model_stay() -> None:
    """A tensor with two names in one model is shared under both."""
    models = [nn.ModuleDict({"embed": nn.Embedding(3, 4), "out": nn.Linear(4, 3, bias=False)}) for _ in range(2)]
    sharing = Sharing()
    for key, model in zip("ab", models, strict=True):
        nn.init.ones_(model["embed"].weight)
        model["out"].weight = model["embed"].weight
        sharing.add(key, model)
    assert models[1]["out"].weight is models[1]["embed"].weight is models[0]["embed"].weight
    assert sharing.tensors == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.tensor(3), torch.tensor(3), True),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
    ],
)
def test_the_same_bits(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    """Bits are compared, not numbers: NaN is itself, and zero has a sign."""
    assert same_bits(one, other) is same


def test_a_call_goes_to_its_tasks_model() -> None:
    """Tasks of any case reach their model; others are refused with the names there are."""
    first, second = Wrapped(nn.Linear(4, 4), 2), Wrapped(nn.Linear(4, 4), 3)
    both, value = TaskModels({"a": first, "b": second}, {"sort": "a", "tag": "b", "twin": "a"}), torch.ones(1, 4)
    assert torch.equal(both(value, task="Sort"), first(value))
    assert torch.equal(both.generate(value, task="tag"), second.generate(value))
    assert both.of("twin") is first
    with pytest.raises(UnknownTask, match="sort, tag, twin"):
        both(value, task="talk")
