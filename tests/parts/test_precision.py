"""Parts in 8 and 4 bits: the bits of packed layers, the bytes of their files, and everything that parts promise."""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file

from pagein.catalog.split.plan import Role, Task
from pagein.errors import ModelUnsuited, NotResident
from pagein.parts.splitting.joining import join, join_version
from pagein.parts.splitting.packing import matrices, packing
from pagein.weights.packed.packing import LAYOUTS, pack, unpack
from tests.parts import served
from tests.parts.served import ids, source
from tests.parts.test_memory import anonymous
from tests.parts.wide import TASKS, Wide, making, packed, split_wide, wide_net

pytestmark = pytest.mark.torch
PACKED = ("int8", "int4")


def test_what_is_packed():
    """Linear layers, transposed ones too; not what is tied to an embedding, a router, small, or of unclear sides."""
    for precision, bits in (("int8", 8), ("int4", 4)):
        found = matrices(wide_net(), precision)
        assert set(found) == {"body.weight", "back.weight", "first.0.weight", "second.weight"}
        assert {one.bits for one in found.values()} == {bits}
        assert (found["back.weight"].rows, found["back.weight"].width, found["back.weight"].transposed) == (
            128, 256, True,
        )  # fmt: skip


@pytest.mark.parametrize("precision", PACKED)
@torch.no_grad()
def test_it_computes_as_packed_layers_do(tmp_path, load, precision):
    """Bit for bit what layers packed in memory give, on every load again; near the full model, and not the same."""
    whole = wide_net()
    plan = split_wide(tmp_path, whole)
    reference = packed(whole, precision)
    model = load(tmp_path, build=Wide, precision=precision)
    for round_ in range(3):
        for task in TASKS:
            answer = model(ids(round_), task=task)
            assert torch.equal(answer, reference(ids(round_), task))
            far = (answer - whole(ids(round_), task)).abs().max() / whole(ids(round_), task).abs().max()
            assert 0 < far < (0.05 if precision == "int8" else 0.3)
        assert model.pagein.unload("first")
        assert model.pagein.unload("second")
    for one in model.pagein.report().parts:
        assert one.precision == precision
        assert one.file_bytes == plan.parts[one.part].file(precision).nbytes


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@torch.no_grad()
def test_codes_of_other_processors_are_computed_with(tmp_path, load, layout):
    """A file whose codes lie as another processor wants them gives what its codes stand for, by the slower way."""
    whole = wide_net()
    conversion = packing("int4", matrices(whole, "int4"), layout)
    parts = {name: replace(part, conversions=(conversion,)) for name, part in making(whole).parts.items()}
    plan = split_wide(tmp_path, whole, parts=parts)
    assert {part.file("int4").layout for part in plan.parts.values()} == {layout}
    reference = copy.deepcopy(whole)
    for name, one in matrices(whole, "int4").items():
        weight = whole.get_parameter(name)
        made = pack(weight.t() if one.transposed else weight, 4, 64, LAYOUTS[layout])
        values = unpack(made["weight_packed"], made["weight_scales"], LAYOUTS[layout])
        reference.get_parameter(name).copy_(values.t() if one.transposed else values)
    model = load(tmp_path, build=Wide, precision="int4")
    for task in TASKS:
        want = reference(ids(), task)
        assert float((model(ids(), task=task) - want).abs().max()) < 0.02 * float(want.abs().max())


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.28), ("int4", 0.18)])
def test_it_takes_fewer_bytes_in_memory(tmp_path, load, precision, most):
    """What the process takes for a part in fewer bits is its file's size, while it is computed from, too."""
    plan = split_wide(tmp_path, wide_net(wide=60_000))
    stored, small = (plan.parts["first"].file(one).nbytes for one in ("stored", precision))
    assert small < most * stored
    model = load(tmp_path, build=lambda: Wide(60_000), precision=precision)
    with torch.no_grad():
        model(ids(rows=1, length=2), task="first")  # what torch keeps for itself is there from now on
        model.pagein.unload("first")
        gc.collect()
        before = anonymous()
        with model.lease("first"):
            model(ids(rows=1, length=2))
            taken = anonymous() - before
    assert 0.9 * small < taken < 1.1 * small + 2**20
    assert model.pagein.unload("first")
    assert anonymous() - before < 0.05 * small + 2**20


@pytest.mark.parametrize("precision", PACKED)
def test_what_is_away_is_not_computed_with(tmp_path, load, precision):
    """A packed layer that is away raises, by whatever way it is used; so does its weight, which is computed."""
    split_wide(tmp_path, wide_net())
    model = load(tmp_path, build=Wide, precision=precision)
    layer, x = model.second, torch.randn(2, 3, 128)
    for use in (
        lambda: layer(x),
        lambda: type(layer).forward(layer, x),
        lambda: type(layer).forward(layer, x.bfloat16()),
        lambda: type(layer).forward(layer, torch.randn(200, 128)),
        lambda: torch.nn.functional.linear(x, layer.weight),
        lambda: x @ layer.weight.t(),
        lambda: layer.weight + 1,
    ):
        with pytest.raises(NotResident) as told:
            use()
        assert told.value.details["tensor"].startswith("second.weight")
    assert (layer.weight.shape, layer.weight.dtype) == ((160, 128), torch.float32)
    with model.lease("second"):
        assert torch.equal(layer.weight, packed(wide_net(), precision).second.weight)


@pytest.mark.parametrize("precision", PACKED)
@torch.no_grad()
def test_it_is_cast_but_for_codes_and_scales(tmp_path, load, precision):
    """`.to` changes what is not packed, at once and as it comes; the answers are those of a packed model so cast."""
    whole = wide_net()
    split_wide(tmp_path, whole)
    reference = packed(whole, precision)
    kept = {name: one for name, one in reference.named_buffers() if one.dtype == torch.bfloat16}
    reference.to(torch.float16)
    for name, scales in kept.items():  # a module of its own casts scales, too; a part does not
        layer = reference.get_submodule(name.rpartition(".")[0])
        layer._buffers["weight_scales"], layer.dtype = scales, torch.float16
    model = load(tmp_path, build=Wide, precision=precision)
    model(ids(), task="first")
    model.to(torch.float16)
    for task in TASKS:
        assert torch.equal(model(ids(), task=task), reference(ids(), task))
    with model.lease("second"):
        assert model.second.weight_scales.dtype == torch.bfloat16
        assert model.second.weight_packed.dtype == (torch.int8 if precision == "int8" else torch.uint8)


@torch.no_grad()
def test_what_is_not_the_true_model_is_not_saved(tmp_path, load):
    """`state_dict` is refused: it promises true weights. A copy computes what the model does, and knows no parts."""
    whole = wide_net()
    split_wide(tmp_path, whole)
    model = load(tmp_path, build=Wide, precision="int4")
    with pytest.raises(ModelUnsuited, match="8 or 4 bits"):
        model.state_dict()
    copied = copy.deepcopy(model)
    for task in TASKS:
        assert torch.equal(copied(ids(), task), model(ids(), task=task))
    for one in (copied, copied.second, model.body):
        with pytest.raises(ModelUnsuited, match="8 or 4 bits"):
            one.state_dict()
    assert torch.equal(load(tmp_path, build=Wide).state_dict()["second.weight"], whole.second.weight)


@pytest.mark.parametrize("precision", PACKED)
@torch.no_grad()
def test_a_copy_is_cast_as_the_model_is(tmp_path, load, precision):
    """`.to` of a copy leaves codes and scales, which kernels take in no other type, and changes the rest."""
    split_wide(tmp_path, wide_net())
    model = load(tmp_path, build=Wide, precision=precision)
    copied = copy.deepcopy(model).half()
    model.half()
    for task in TASKS:
        answer = copied(ids(), task)
        assert answer.dtype == torch.float16
        assert torch.equal(answer, model(ids(), task=task))
    assert copied.second.weight_scales.dtype == torch.bfloat16
    assert copied.second.weight.dtype == torch.float16


@pytest.mark.parametrize("precision", PACKED)
def test_calls_against_an_evictor(tmp_path, load, precision):
    """Threads on two packed heads get their own answers while parts are taken away (scenario 4)."""
    whole = wide_net()
    split_wide(tmp_path, whole)
    reference = packed(whole, precision)
    model = load(tmp_path, build=Wide, precision=precision)
    with torch.no_grad():
        want = {task: reference(ids(), task) for task in TASKS}
    wrong, over = [], threading.Event()

    @torch.no_grad()
    def call(task: str) -> None:
        wrong.extend(task for _ in range(60) if not torch.equal(model(ids(), task=task), want[task]))

    def evict() -> None:
        while not over.is_set():
            model.pagein.unload("first")
            model.pagein.unload("second")
            os.sched_yield()

    threads = [threading.Thread(target=call, args=(task,)) for task in TASKS]
    evictor = threading.Thread(target=evict)
    for thread in [evictor, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    evictor.join()
    assert wrong == []
    assert sum(one.evictions for one in model.pagein.report().parts) > 0


@pytest.mark.parametrize("precision", PACKED)
@torch.no_grad()
def test_a_packed_part_is_replaced(tmp_path, load, precision):
    """Another version comes in the precisions of the part whose place it takes, and stands there while calls run."""
    whole, tuned = wide_net(), wide_net()
    with torch.no_grad():
        tuned.second.weight.normal_(std=0.5)
    split = tmp_path / "split"
    split_wide(split, whole)
    model = load(split, build=Wide, precision=precision)
    assert torch.equal(model(ids(), task="second"), packed(whole, precision)(ids(), "second"))
    save_file({"second.weight": tuned.second.weight.detach()}, tmp_path / "tuned.safetensors")
    plan = join_version(split, tmp_path / "tuned.safetensors", "second", "second-2").plan
    assert set(plan.parts["second-2"].files) == {"stored", "int8", "int4"}
    model.pagein.refresh()
    model.pagein.replace("second", "second-2")
    assert torch.equal(model(ids(), task="second"), packed(tuned, precision)(ids(), "second"))
    assert torch.equal(model(ids(), task="used"), packed(tuned, precision)(ids(), "used"))
    model.pagein.replace("second", "second")
    assert torch.equal(model(ids(), task="second"), packed(whole, precision)(ids(), "second"))


@torch.no_grad()
def test_what_cannot_stand_in_a_packed_place_is_refused(tmp_path, load):
    """A version without the precision is refused by name, and the model serves on; at a new start none of both is
    packed."""
    whole = wide_net()
    made = {name: part.file("stored").tensors for name, part in split_wide(tmp_path, whole).parts.items()}
    model = load(tmp_path, build=Wide, precision="int8")
    join(tmp_path, "other", {"second.weight": source(whole.second.weight)}, {}, {}, Role.SHARED, "second")
    with pytest.raises(ModelUnsuited, match=r"'other' has 'second.weight', .* 'second.weight_packed'"):
        model.pagein.refresh()
    assert torch.equal(model(ids(), task="second"), packed(whole, "int8")(ids(), "second"))
    plain = {name: source(one) for name, one in whole.state_dict().items() if name in made["backbone"]}
    join(tmp_path, "base", plain, {}, {}, Role.ADAPTER, "backbone")
    with pytest.raises(ModelUnsuited, match="'base' has"):
        load(tmp_path, build=Wide, precision={"backbone": "int8", "second": "stored"})
    plan = json.loads((tmp_path / "split_plan.json").read_text())
    del plan["parts"]["base"]
    (tmp_path / "split_plan.json").write_text(json.dumps(plan))
    again = load(tmp_path, build=Wide, precision="int8")
    forms = {one.part: one.precision for one in again.pagein.report().parts}
    assert forms == {"backbone": "int8", "first": "int8", "second": "stored", "other": "stored"}
    again.pagein.replace("second", "other")
    reference = packed(whole, "int8")
    reference.second = whole.second
    assert torch.equal(again(ids(), task="second"), reference(ids(), "second"))


@pytest.mark.parametrize("precision", PACKED)
@torch.no_grad()
def test_adapters_on_a_packed_backbone(tmp_path, load, precision):
    """LoRAs add to packed layers as to any, and a layer that an adapter brings whole is used as it is, for its call."""
    whole = wide_net()
    split_wide(tmp_path, whole)
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(4, 128, generator=generator), torch.randn(256, 4, generator=generator)
    lora = {
        "lora/body.lora_A.weight": source(a),
        "lora/body.lora_B.weight": source(b),
        "lora/body.scaling": source(torch.tensor([0.25], dtype=torch.float64)),
    }
    own = torch.randn(160, 128, generator=generator)
    tasks = {"tuned": Task("tuned", ("backbone", "second", "lora"), "tokens")}
    served.add_part(tmp_path, "lora", lora, tasks=tasks)
    tasks = {"own": Task("own", ("backbone", "second", "own"), "tokens")}
    served.add_part(tmp_path, "own", {"own/second.weight": source(own)}, tasks=tasks)
    model = load(tmp_path, build=WideTasks, precision=precision)
    reference = packed(whole, precision)
    plain = reference(ids(), "second")
    reference.body = served.WithLora(reference.body, a, b, 0.25)
    for _ in range(2):
        assert torch.equal(model(ids(), task="tuned"), reference(ids(), "second"))
        assert torch.equal(model(ids(), task="second"), plain)
        for part in ("lora", "second"):
            assert model.pagein.unload(part)
    reference = packed(whole, precision)
    reference.second.__class__ = torch.nn.Linear
    reference.second._buffers.clear()
    reference.second.weight = torch.nn.Parameter(own)
    assert torch.equal(model(ids(), task="own"), reference(ids(), "second"))
    assert torch.equal(model(ids(), task="second"), plain)


@pytest.mark.parametrize("precision", ["stored", *PACKED])
@torch.no_grad()
def test_a_transposed_layer_stays_one(tmp_path, load, precision):
    """Of a Conv1D the weight lies as its class has it, packed or not, and so does one that an adapter brings."""
    whole = wide_net()
    split_wide(tmp_path, whole)
    own = torch.randn(256, 128, generator=torch.Generator().manual_seed(3))
    tasks = {"own": Task("own", ("backbone", "second", "own"), "tokens")}
    served.add_part(tmp_path, "own", {"own/back.weight": source(own)}, tasks=tasks)
    model = load(tmp_path, build=WideTasks, precision=precision)
    reference = whole if precision == "stored" else packed(whole, precision)
    want = reference(ids(), "second")
    weight = whole.back.weight
    assert model.back.weight.shape == weight.shape
    assert (model.back.weight - weight).abs().max() < 0.1 * weight.abs().max()
    reference.back = copy.deepcopy(wide_net().back)
    reference.back.weight = torch.nn.Parameter(own)
    far = (model(ids(), task="own") - reference(ids(), "second")).abs().max()
    assert far <= 1e-5 * want.abs().max()
    assert torch.equal(model(ids(), task="second"), want)
    served.add_part(tmp_path, "bad", {"bad/back.weight": source(own.t().contiguous())}, tasks={})
    with pytest.raises(
        ModelUnsuited, match=r"'bad/back.weight' has the shape \[128, 256\], the model's is \[256, 128\]"
    ):
        load(tmp_path, build=WideTasks, precision=precision)


class WideTasks(Wide):
    """The net, asked for tasks that its code does not know."""

    def forward(self, ids, task):
        return super().forward(ids, "second" if task in ("tuned", "own") else task)


WideTasks.__name__ = "Wide"
