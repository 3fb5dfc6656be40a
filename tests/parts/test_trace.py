"""Tracing by identity, the rules on what it finds, and the proof (scenario 20)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import NotResident, SplitBroken
from pagein.parts.splitting import rules
from pagein.parts.splitting.analyse import study
from pagein.parts.splitting.analysis import Analysis
from pagein.parts.splitting.calling import Calls
from pagein.parts.splitting.proof import everything_else_cold, needed_by, prove
from pagein.parts.splitting.rules import assign
from pagein.parts.splitting.trace import NamedTensors, watch
from tests.parts.models import mapping
from tests.parts.nets import Odd, odd

pytestmark = pytest.mark.torch
SHORT, LONG = [1, 2, 3], [9, 9, 9]
TASKS = {
    name: {"kind": "call", "call": name, "samples": [SHORT, LONG]} for name in ("classify", "attend", "write", "fold")
}


@pytest.fixture(scope="module")
def found() -> Analysis:
    """The odd net's analysis."""
    return study(odd(), mapping(**TASKS))


def touched(call: str, ids: list[int] = SHORT) -> set[str]:
    model = odd().model
    with torch.no_grad(), watch(NamedTensors(model)) as names:
        getattr(model, call)(torch.tensor([ids]))
    return set(names)


BODY = {"embed.weight", "logits.weight", "body.weight", "body.bias"}
NORM = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize(
    ("call", "own"),
    [
        ("classify", {"cls.weight", "cls.bias", *NORM}),
        ("attend", {"shift", "table", *(f"attention.{one}" for one in
                    ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"))}),
        ("write", set()),
        ("fold", {f"recurrent.{one}_l0" for one in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}),
    ],
)  # fmt: skip
def test_each_kind_of_use_is_seen_and_no_other(call: str, own: set[str]) -> None:
    """Functional use, bare parameters, buffers, attention's projection, recurrent lists and tied twins; not shapes."""
    assert touched(call) == BODY | own


def test_branches_follow_the_data() -> None:
    """Only the input that takes a branch uses its weights."""
    assert touched("write", LONG) - touched("write", SHORT) == {"rare.weight", "rare.bias"}


def test_views_and_twins_by_storage_are_found() -> None:
    """A view kept from before, and a parameter over another's bytes, are the tensor itself."""
    model = odd().model
    view = model.body.weight.detach()[2:, :]
    model.idle.weight = torch.nn.Parameter(model.rare.weight.detach())
    tensors = NamedTensors(model)
    assert ("rare.weight", "idle.weight") in tensors.tied
    with torch.no_grad(), watch(tensors) as names:
        torch.ones(1, 14) @ view
    assert names == {"body.weight"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_only_python_and_what_only_the_kernels_see() -> None:
    """An address for foreign code is a use that no operation tells of, compiled code one that no function does."""
    model = odd().model
    model.rare = torch.jit.trace(model.rare, torch.ones(1, 16))
    tensors = NamedTensors(model)
    with torch.no_grad(), watch(tensors) as names:
        model.shift.data_ptr()
    assert names == {"shift"}
    with torch.no_grad(), watch(tensors) as names:
        model.rare(torch.ones(1, 16))
    assert names == {"rare.weight", "rare.bias"}


def test_every_task_is_proven(found: Analysis) -> None:
    """With everything else cold each task gives the full model's bits, and what breaks a rule is in the backbone."""
    parts = found.assignment.parts
    assert {name: one.compared for name, one in found.tasks.items()} == dict.fromkeys(TASKS, 2)
    assert set(parts) == {"backbone", "classify", "attend", "fold"}
    assert {"cls.weight", "norm.running_mean"} <= set(parts["classify"].tensors)
    assert "attention.out_proj.weight" in parts["attend"].tensors
    assert {"rare.weight", "idle.weight"} <= set(parts["backbone"].tensors)
    rare = next(one for one in found.assignment.kept if one.tensor == "rare.weight")
    assert rare.rule == 3
    assert found.tasks["write"].sometimes == 2
    assert found.assignment.untouched == ("norm.num_batches_tracked", "idle.weight", "idle.bias")
    assert found.assignment.tied == (("embed.weight", "logits.weight"),)
    assert found.buffers == {"made": "computed by Odd as it is made"}
    assert found.made["proof"] == "bit-identical"


def test_a_use_that_the_trace_missed_fails_the_proof() -> None:
    """A split that leaves out a tensor that a task uses is not proven; the message names task and tensor."""
    whole, tasks = odd(), mapping(**TASKS)
    calls, tensors = Calls(whole, tasks.tasks), NamedTensors(whole.model)
    uses = {
        name: rules.TensorUse(one.nbytes, {"attend": 2} if "out_proj" in name else {"attend": 2, "write": 2})
        for name, one in tensors.tensors.items()
    }
    wrong = assign(rules.Influence({"attend": 2, "write": 2}, uses, tuple(tensors.tied)), 0)
    expected = {"write": [calls.run("write", 0)], "attend": [calls.run("attend", 0)]}
    assert prove(calls, whole.model, tensors, wrong, expected, "write") == 1
    stolen = rules.Assignment(
        wrong.parts, {**wrong.tasks, "attend": ("backbone",)}, wrong.tied, (), (), wrong.nbytes, wrong.saves
    )
    with pytest.raises(SplitBroken, match=r"task 'attend', sample 1 uses 'attention\.out_proj"):
        prove(calls, whole.model, tensors, stolen, expected, "attend")
    with pytest.raises(SplitBroken, match="others than the full model's"):
        prove(calls, whole.model, tensors, wrong, {"write": expected["attend"]}, "write")


def test_what_was_cold_comes_back() -> None:
    """After the proof, also after one that failed, every tensor hangs where it was."""
    model: Odd = odd().model
    tensors = NamedTensors(model)
    before = {name: id(one) for name, one in model.state_dict(keep_vars=True).items()}
    with pytest.raises(NotResident), everything_else_cold(model, tensors, {"embed.weight"}, "write"):
        model.write(torch.tensor([SHORT]))
    assert {name: id(one) for name, one in model.state_dict(keep_vars=True).items()} == before
    assert model.fold(torch.tensor([SHORT])).shape == (1, 3, 16)


def test_a_model_that_does_not_repeat_itself_is_said_to() -> None:
    """Where the full model gives other bits each time, that is the reason given."""
    whole = odd()
    count = iter(range(100))
    whole.model.dice = lambda input_ids: whole.model.hidden(input_ids) + next(count)
    whole.keys["dice"] = "odd"
    with pytest.raises(SplitBroken, match="other bits each time"):
        study(whole, mapping(dice={"kind": "call", "call": "dice", "samples": [SHORT]}))


def test_a_sample_that_fails_is_named() -> None:
    """An error of a sample call tells task and sample, and a call that returns nothing proves nothing."""
    whole = odd()
    tasks = mapping(write={"kind": "call", "call": "write", "samples": [SHORT, [99]]})
    with pytest.raises(SplitBroken, match="task 'write', sample 2: IndexError"):
        study(whole, tasks)
    whole.model.nothing = lambda input_ids: None
    whole.keys["nothing"] = "odd"
    with pytest.raises(SplitBroken, match="no tensor to compare"):
        study(whole, mapping(nothing={"kind": "call", "call": "nothing", "samples": [SHORT]}))


def test_a_head_that_no_sample_uses_is_a_fault() -> None:
    """Modules named as heads must be used by their task's samples, and must be there."""
    whole = odd()
    task = {"kind": "call", "call": "classify", "samples": [SHORT]}
    with pytest.raises(SplitBroken, match="none of its samples used any of the 2 tensors of its head 'rare'"):
        study(whole, mapping(classify={**task, "heads": ["rare"]}))
    with pytest.raises(SplitBroken, match="no module 'tail'"):
        study(whole, mapping(classify={**task, "heads": ["tail"]}))
    assert study(odd(), mapping(classify={**task, "heads": ["cls"]})).tasks["classify"].heads == {"cls": (2, 2)}


def test_what_reads_anothers_results_keeps_it_in_the_backbone() -> None:
    """A task that goes on from another's results keeps what computed them in the backbone (rule 1)."""
    tasks = mapping(**{**TASKS, "write": {**TASKS["write"], "reads": ["classify"]}})
    found = study(odd(), tasks)
    assert "classify" not in found.assignment.parts
    assert {one.rule for one in found.assignment.kept if one.tensor == "cls.weight"} == {1}


def test_needed_names_have_their_twins(found: Analysis) -> None:
    """What a task's parts bring is there under every name."""
    assert {"embed.weight", "logits.weight"} <= needed_by("write", found.assignment)
