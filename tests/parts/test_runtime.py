"""`load_parts`: what it builds, in which precision, and what it refuses."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import pagein
from pagein.catalog.split.plan import Role
from pagein.errors import BadModelFile, ModelUnsuited, PartTooLarge, PlanRefused
from pagein.parts import renewal
from pagein.parts.building import parameters_on_meta
from pagein.parts.opening import load_parts
from pagein.parts.splitting.making import Conversion, PartMaking
from tests.parts.served import HEADS, PARTS, Net, add_part, ids, llama, net, source, split_llama, split_net

pytestmark = pytest.mark.torch


def test_it_is_public():
    """`from pagein import load_parts` is this function."""
    assert pagein.load_parts is load_parts


def test_only_parameters_are_built_on_meta():
    """Parameters of this thread's modules are on meta and tied as ever; buffers, and what others make, are real."""
    made = []
    with parameters_on_meta():
        one = Net()
        thread = threading.Thread(target=lambda: made.append(Net()))
        thread.start()
        thread.join()
    assert all(parameter.is_meta for parameter in one.parameters())
    assert one.words.weight is one.embed.weight
    assert torch.equal(one.turns, made[0].turns)
    assert not any(parameter.is_meta for parameter in [*made[0].parameters(), *Net().parameters()])


def test_another_class_is_refused(tmp_path, load):
    """A split is not put into a model of another class, nor of other shapes, nor into one with weights of no part."""
    split_net(tmp_path, net())
    with pytest.raises(ModelUnsuited, match="Linear"):
        load(tmp_path, build=lambda: torch.nn.Linear(2, 2))
    with pytest.raises(ModelUnsuited, match="shape"):
        load(tmp_path, build=lambda: Net(25))

    def more() -> Net:
        made = Net()
        made.extra = torch.nn.Parameter(torch.ones(3))
        return made

    with pytest.raises(ModelUnsuited, match="extra"):
        load(tmp_path, build=more)


def test_without_a_plan_there_is_no_model(tmp_path, load):
    """A folder without a plan is no split."""
    with pytest.raises(PlanRefused):
        load(tmp_path, build=Net)


def test_a_plan_makes_no_code_run(tmp_path, load):
    """A class that transformers does not have is built by the caller or not at all; auto_map is refused."""
    split_net(tmp_path, net())
    with pytest.raises(ModelUnsuited, match="no config"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadModelFile, match="digest"):
        load(tmp_path)


def test_a_changed_configuration_is_refused(tmp_path, load):
    """The configuration is the one that the plan was made with."""
    split_llama(tmp_path, llama())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5.0}))
    with pytest.raises(BadModelFile, match="digest"):
        load(tmp_path)


def test_a_backbone_that_does_not_fit_is_refused(tmp_path, load):
    """The allowance holds from the start."""
    split_net(tmp_path, net())
    with pytest.raises(PartTooLarge, match="backbone"):
        load(tmp_path, "1KiB", build=Net)


@torch.no_grad()
def test_precisions_are_chosen_by_part(tmp_path, load):
    """Parts come in the precision that is wanted of them, where they have it; the file's type is the tensor's."""
    whole = net()

    def halve(name, tensor):
        return {name: source(state[name].to(torch.bfloat16))}

    state = whole.state_dict()
    bf16 = Conversion("bf16", "test", halve)
    parts = {
        name: PartMaking(
            Role.BACKBONE if name == "backbone" else Role.SHARED if name == "tag" else Role.TASK, names, (bf16,)
        )
        for name, names in PARTS.items()
    }
    split_net(tmp_path, whole, parts=parts)
    with pytest.raises(ModelUnsuited, match=r"part 'backbone' in F32 \(stored\) and part 'tag' in BF16 \(bf16\)"):
        load(tmp_path, build=Net, precision={"tag": "bf16"})
    model = load(tmp_path, build=Net, precision=dict.fromkeys(PARTS, "bf16"))
    with model.lease("tag"):
        assert torch.equal(model.tag.weight, whole.tag.weight.to(torch.bfloat16))
    model = load(tmp_path, build=Net)
    assert torch.equal(model(ids(), task="score"), whole(ids(), "score"))
    low = load(tmp_path, build=Net, precision="bf16")
    whole.to(torch.bfloat16)
    low.to(torch.bfloat16)
    for task in HEADS:
        assert torch.equal(low(ids(), task=task), whole(ids(), task))
    assert {one.precision for one in low.pagein.report().parts} == {"bf16"}


def test_a_whole_lease_has_every_part(tmp_path, load):
    """A request that does not take part in the roll-out leases everything, by the same door."""
    split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    with model.lease("tag", whole=True):
        assert {(one.state, one.leases) for one in model.pagein.report().parts} == {("hot", 1)}
        assert not any(model.pagein.unload(part) for part in PARTS)


def test_the_sweeper_ends_with_its_model(tmp_path):
    """A model that nobody has any more is collected, with its parts, its folder, and the thread that looks after it."""
    split_net(tmp_path, net())
    before = set(threading.enumerate())
    model = load_parts(tmp_path, build=Net, sweep_seconds=0.001)
    sweepers = set(threading.enumerate()) - before
    gone = weakref.ref(model)
    del model
    gc.collect()
    for thread in sweepers:
        thread.join(10)
        assert not thread.is_alive()
    gc.collect()
    assert gone() is None


def test_two_refreshes_at_once(tmp_path, load, monkeypatch):
    """A part that two threads let join at the same time joins once: what the faster one loaded is not forgotten."""
    split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    add_part(tmp_path, "m", {"m/tag.weight": source(torch.ones(5, 16))})
    ordinary = renewal.check_together

    def slow(plan, forms):
        monkeypatch.setattr(renewal, "check_together", ordinary)
        model.pagein.refresh()
        model.pagein.load("m")
        ordinary(plan, forms)

    monkeypatch.setattr(renewal, "check_together", slow)
    model.pagein.refresh()
    states = {one.part: one.state for one in model.pagein.report().parts}
    assert states["m"] == "hot"
    assert model.pagein.unload("m")
