"""What reads, copies or casts all tensors finds those that are away, too."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from pagein.errors import ModelUnsuited, NotResident, PartRefused, PartsBusy
from pagein.parts.placeholder import is_cold
from pagein.parts.splitting.joining import join_version
from tests.parts.served import HEADS, PARTS, Net, ids, net, split_net

pytestmark = pytest.mark.torch
WARM = {"none": (), "some": ("tag", "score"), "all": HEADS}


@pytest.fixture(params=WARM.values(), ids=WARM)
def pair(request, tmp_path, load):
    """The whole net, and the same as parts with none, some or all heads in memory."""
    whole = net()
    split_net(tmp_path, whole)
    model = load(tmp_path, build=Net)
    for task in request.param:
        model.pagein.warm(task)
    with torch.no_grad():
        yield whole, model


def same(found, wanted) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_state_dict_has_the_true_weights(pair):
    """Whatever is away is read from its file, and comes proven; tied names are one tensor (scenario 8)."""
    whole, model = pair
    before = [one.state for one in model.pagein.report().parts]
    found = model.state_dict()
    assert same(found, whole.state_dict())
    assert found["embed.weight"].data_ptr() == found["words.weight"].data_ptr()
    assert [one.state for one in model.pagein.report().parts] == before
    kept = model.state_dict(keep_vars=True, prefix="x.")
    assert {name: one.requires_grad for name, one in kept.items() if isinstance(one, torch.nn.Parameter)} == {
        f"x.{name}": True for name in [*dict(whole.named_parameters()), "words.weight"]
    }


def test_what_is_saved_is_whole(pair, tmp_path):
    """A saved file has no empty tensor."""
    whole, model = pair
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    fresh = Net()
    fresh.load_state_dict(torch.load(tmp_path / "saved.pt"))
    assert torch.equal(fresh.eval()(ids(), "attend"), whole(ids(), "attend"))


def test_a_copy_is_an_ordinary_whole_model(pair):
    """deepcopy gives the ordinary model with all weights; what happens to the original does not reach it."""
    whole, model = pair
    twin = copy.deepcopy(model)
    assert type(twin) is Net
    for part in PARTS:
        model.pagein.unload(part)
    assert same(twin.state_dict(), whole.state_dict())
    assert twin.words.weight is twin.embed.weight
    for task in HEADS:
        assert torch.equal(twin(ids(), task), whole(ids(), task))


def test_a_copied_head_is_its_own(pair):
    """A head can be copied alone: whole if it was there, cold if not; no lease of the original is asked for."""
    whole, model = pair
    twin = copy.deepcopy(model.classify)
    if is_cold(model.classify[0].weight):
        with pytest.raises(NotResident):
            twin(torch.ones(1, 16))
    else:
        assert torch.equal(twin(torch.ones(1, 16)), whole.classify(torch.ones(1, 16)))


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.double().half()])
def test_a_cast_reaches_what_is_away(pair, cast):
    """half and to cast what is there, and what comes later; and again after it has left (scenario 9)."""
    whole, model = pair
    cast(whole), cast(model)
    for _ in range(2):
        for task in HEADS:
            assert torch.equal(model(ids(), task=task), whole(ids(), task))
            model.pagein.unload(task)
    assert {one.dtype for one in model.parameters()} == {torch.float16}
    assert same(model.state_dict(), whole.state_dict())
    sizes = {one.part: one.bytes for one in model.pagein.report().parts}
    assert sizes["backbone"] == sum(one.nbytes for name, one in whole.state_dict().items() if name in PARTS["backbone"])


def test_a_cast_that_changes_nothing_does_nothing(pair):
    """to() with the device and type that the model has leaves everything where it is."""
    _, model = pair
    before = [(one.state, one.bytes, one.loads) for one in model.pagein.report().parts]
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert [(one.state, one.bytes, one.loads) for one in model.pagein.report().parts] == before


def test_a_cast_waits_for_calls(pair):
    """Nothing is cast under a call that runs."""
    _, model = pair
    model.pagein.wait = 0.0
    with model.lease("tag"), pytest.raises(PartsBusy, match="in use"):
        model.half()
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_another_device_is_refused(pair):
    """A model whose parts come to one device cannot be moved to another."""
    _, model = pair
    with pytest.raises(ModelUnsuited, match="meta"):
        model.to("meta")


def test_names_shapes_and_counts_stay(pair):
    """Parameters and buffers are the ordinary ones by name, shape and number, and optimizers take them."""
    whole, model = pair
    for kind in ("named_parameters", "named_buffers"):
        wanted = [(name, one.shape, one.dtype) for name, one in getattr(whole, kind)()]
        assert [(name, one.shape, one.dtype) for name, one in getattr(model, kind)()] == wanted
    torch.optim.AdamW(model.parameters()).step()


def test_requires_grad_stays(pair):
    """What was frozen stays frozen, and what was not does not, over loads and evictions."""
    _, model = pair
    model.requires_grad_(False)
    model.score.requires_grad_(True)
    for _ in range(2):
        for task in HEADS:
            with model.lease(task):
                assert [name for name, one in model.named_parameters() if one.requires_grad] == ["score"]
            model.pagein.unload(task)


def test_ties_and_computed_buffers_stay(pair):
    """Tied tensors stay one, and buffers that no file has stay as computed, over five rounds (scenario 10)."""
    whole, model = pair
    for _ in range(5):
        for task in HEADS:
            model(ids(), task=task)
            model.pagein.unload(task)
        assert model.words.weight is model.embed.weight
        assert torch.equal(model.turns, whole.turns)


def test_it_cannot_be_pickled(pair):
    """A pickle would lack what is away."""
    with pytest.raises(ModelUnsuited, match="cannot be pickled"):
        pickle.dumps(pair[1])


def test_what_cannot_be_read_is_not_saved(tmp_path, load):
    """state_dict raises where a cold part's file is damaged; nothing made up is returned."""
    plan = split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    (tmp_path / plan.parts["tag"].file("stored").file).write_bytes(b"x")
    with pytest.raises(PartRefused):
        model.state_dict()


@pytest.mark.parametrize("there", [True, False])
@torch.no_grad()
def test_a_copy_is_of_one_version(tmp_path, load, there):
    """A part that is replaced while the model is copied, or its weights are listed, comes whole: as it was before."""
    whole, tuned = net(), net(1)
    split = tmp_path / "split"
    split_net(split, whole)
    save_file({name: tuned.state_dict()[name] for name in PARTS["classify"]}, tmp_path / "v2.safetensors")
    join_version(split, tmp_path / "v2.safetensors", "classify", "classify-2")
    model = load(split, build=Net, wait=0.0)
    parts, middle = model.pagein, model.classify[1]

    def begin() -> None:
        parts.replace("classify", "classify")
        parts.unload("classify-2")
        if there:
            parts.load("classify")
        else:
            parts.unload("classify")

    def replace() -> None:
        free = parts.unload("classify") or not there  # what is being copied does not leave
        parts.replace("classify", "classify-2")
        if free:
            parts.load("classify")

    def back() -> None:
        parts.replace("classify", "classify")

    class Between:
        def __init__(self, act) -> None:
            self.act = act

        def __deepcopy__(self, memo):
            self.act()
            return self

    begin()
    middle.__dict__["between"], model.tag.__dict__["between"] = Between(replace), Between(back)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids(), "classify"), whole(ids(), "classify"))
    del middle.__dict__["between"], model.tag.__dict__["between"]
    begin()
    middle.register_state_dict_pre_hook(lambda *given: replace())
    model.tag.register_state_dict_pre_hook(lambda *given: back())
    found = model.state_dict()
    assert all(torch.equal(found[name], whole.state_dict()[name]) for name in PARTS["classify"])
