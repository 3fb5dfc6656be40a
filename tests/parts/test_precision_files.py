"""From a model's folder to files in fewer bits; the numbers of `compare`; what both have in common with `weights`."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.catalog.split import packed
from pagein.errors import SplitBroken, UnknownTask
from pagein.parts.composed import TaskModels
from pagein.parts.splitting import comparing
from pagein.parts.splitting.analyse import analyse
from pagein.parts.splitting.apply import apply
from pagein.parts.splitting.comparing import compare
from pagein.parts.splitting.packing import Matrix, matrices, packing
from pagein.parts.splitting.tasks import Kind
from pagein.weights.packed.making import HEAD_BITS
from pagein.weights.packed.packing import GROUPS, LAYOUTS, native_layout, pack
from tests.parts.models import BERT, IDS, LLAMA, lora, mapping, quiet
from tests.parts.served import source
from tests.parts.wide import packed as packed_model

pytestmark = pytest.mark.torch
WIDE = {"hidden_size": 128, "intermediate_size": 256}


def loud(model):
    """Make weights large enough that other numbers give other answers."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model


def test_names_and_layouts_are_those_of_weights():
    """What plans say of layouts and groups is what `weights.packing` means by it."""
    assert set(packed.LAYOUTS) == set(LAYOUTS)
    assert packed.GROUPS == GROUPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_pieces_are_packed_as_the_whole(dtype, bits, monkeypatch):
    """However a weight's bytes come, codes and scales are those of the whole weight; scales may be asked for first."""
    from pagein.parts.splitting import packing as module

    monkeypatch.setattr(module, "_WEIGHTS_AT_ONCE", 128 * 64)
    weight = torch.randn(208, 128).to(dtype)
    for turned in (False, True):
        one = source(weight.t() if turned else weight)
        data = b"".join(map(bytes, one.chunks()))
        pieces = type(one)(
            one.dtype, one.shape, lambda data=data: [data[at : at + 999] for at in range(0, len(data), 999)]
        )
        found = packing("int4", {"x.weight": Matrix(208, 128, bits, turned)}).convert("x.weight", pieces)
        want = pack(weight, bits, 64, native_layout() or LAYOUTS["halves64"])
        for leaf in ("weight_scales", "weight_packed", "weight_scales"):
            made = b"".join(map(bytes, found[f"x.{leaf}"].chunks()))
            assert made == want[leaf].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert found[f"x.{leaf}"].shape == tuple(want[leaf].shape)


def test_what_is_not_finite_is_refused():
    """A weight with an infinity is named, not packed."""
    weight = torch.ones(128, 128)
    weight[3, 4] = float("inf")
    found = packing("int8", {"x.weight": Matrix(128, 128, 8)}).convert("x.weight", source(weight))
    with pytest.raises(SplitBroken, match=r"'x\.weight' cannot be packed"):
        list(found["x.weight_packed"].chunks())


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Two classifiers over one BERT, wide enough to be packed, split in all precisions."""
    quiet()
    root = tmp_path_factory.mktemp("family")
    config = {**BERT, **WIDE}
    base = loud(transformers.BertModel(transformers.BertConfig(**config))).state_dict()
    for name, labels in (("sentiment", 3), ("topic", 7)):
        model = loud(transformers.BertForSequenceClassification(transformers.BertConfig(**config, num_labels=labels)))
        model.bert.load_state_dict(base)
        model.save_pretrained(root / name)
    tasks = mapping(
        sentiment={"kind": "classify", "folder": str(root / "sentiment"), "samples": list(IDS)},
        topic={"kind": "classify", "folder": str(root / "topic"), "samples": list(IDS)},
    )
    split = root / "split"
    plan = apply(analyse(root / "sentiment", tasks), split, ["bf16", "int8", "int4"]).plan
    return root, split, plan, tasks


@torch.no_grad()
def test_a_shared_backbone_is_packed_once(family, load):
    """Layers that two models share are packed once, and both compute as with packed layers; heads stay as stored."""
    root, split, plan, _ = family
    assert set(plan.parts["backbone"].files) == {"stored", "bf16", "int8", "int4"}
    assert {len(part.files) for name, part in plan.parts.items() if name != "backbone"} == {2}
    assert plan.parts["backbone"].file("int4").nbytes < 0.45 * plan.parts["backbone"].file("stored").nbytes
    for precision in ("int8", "int4"):
        model = load(split, precision=precision)
        for task in ("sentiment", "topic"):
            whole = transformers.BertForSequenceClassification.from_pretrained(root / task).eval()
            ids = torch.tensor([IDS[0]])
            answer = model(input_ids=ids, task=task).logits
            assert torch.equal(answer, packed_model(whole, precision)(input_ids=ids).logits)
            assert not torch.equal(answer, whole(input_ids=ids).logits)
        one, other = (model.of(task).bert.encoder.layer[0].output.dense for task in ("sentiment", "topic"))
        assert one.weight_packed is other.weight_packed


@torch.no_grad()
def test_differences_are_measured(family):
    """`compare` measures what can be computed by hand: largest, mean, and the scale of logits; each task, each form."""
    root, split, plan, tasks = family
    found = []
    compare(split, tasks, [], found.append)
    assert {(one.task, one.precision) for one in found} == {
        (task, form) for task in ("sentiment", "topic") for form in ("bf16", "int8", "int4")
    }
    by = {(one.task, one.precision): one for one in found}
    whole = transformers.BertForSequenceClassification.from_pretrained(root / "topic").eval()
    small = packed_model(whole, "int4")
    pairs = [(whole(input_ids=torch.tensor([one])).logits, small(input_ids=torch.tensor([one])).logits) for one in IDS]
    away = torch.cat([(one - other).abs().double() for one, other in pairs])
    one = by["topic", "int4"]
    assert (one.samples, one.values) == (2, 14)
    assert one.most == pytest.approx(float(away.max()))
    assert one.mean == pytest.approx(float(away.mean()))
    assert one.scale == pytest.approx(float(torch.cat([a for a, _ in pairs]).double().square().mean().sqrt()))
    assert one.agree == sum(int(a.argmax() == b.argmax()) for a, b in pairs) / 2
    assert one.nbytes == plan.parts["backbone"].file("int4").nbytes + plan.parts["topic"].file("stored").nbytes
    assert by["topic", "int8"].mean < one.mean
    with pytest.raises(UnknownTask):
        compare(split, mapping(other={"kind": "classify", "samples": list(IDS)}), [], found.append)


@torch.no_grad()
def test_a_writer_is_measured_on_its_own_text(tmp_path, load):
    """Logits are compared at each place of what is written as stored, a task's with its LoRA; the head has 8 bits."""
    quiet()
    config = transformers.LlamaConfig(**{**LLAMA, **WIDE, "vocab_size": 160})
    loud(transformers.LlamaForCausalLM(config)).save_pretrained(tmp_path / "base")
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    lora(tmp_path / "lora", 1)
    tensors = {}
    from safetensors.torch import load_file, save_file

    for name, one in load_file(tmp_path / "lora" / "adapter_model.safetensors").items():
        rows = 64 if "v_proj" in name else 128
        tensors[name] = 0.05 * torch.randn((4, 128) if "lora_A" in name else (rows, 4)) if one.dim() == 2 else one
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    tasks = mapping(
        plain={"kind": "generate", "samples": list(IDS), "max_new_tokens": 6},
        tuned={"kind": "generate", "samples": list(IDS), "adapter": str(tmp_path / "lora")},
    )
    split = tmp_path / "split"
    plan = apply(analyse(tmp_path / "base", tasks), split, ["int4"]).plan
    assert "int4" not in plan.parts["tuned.adapter"].files
    home = next(part for part in plan.parts.values() if "lm_head.weight" in part.file("stored").tensors)
    assert home.file("int4").tensors["lm_head.weight_packed"].dtype == {8: "I8", 4: "U8"}[HEAD_BITS]
    found = []
    compare(split, tasks, ["int4"], found.append)
    plain, tuned = found
    small, away = packed_model(whole, "int4"), []
    for sample in IDS:
        text = whole.generate(torch.tensor([sample]), max_new_tokens=6, min_new_tokens=6, do_sample=False)[:, :-1]
        away.append((whole(input_ids=text).logits - small(input_ids=text).logits).abs().double().reshape(-1))
    assert plain.values == sum(len(one) + 5 for one in IDS) * 160
    assert plain.most == pytest.approx(float(torch.cat(away).max()))
    assert plain.mean == pytest.approx(float(torch.cat(away).mean()))
    assert tuned.mean != plain.mean
    model = load(split, precision="int4")
    ids = torch.tensor([IDS[1]])
    assert torch.equal(model(ids, task="plain").logits, small(ids).logits)
    assert not torch.equal(model(ids, task="tuned").logits, small(ids).logits)


def test_what_is_no_number_is_not_called_equal(tmp_path):
    """A model whose activations overflow in fp16 is far from itself as stored; words that are barred are not."""
    quiet()
    model = loud(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **WIDE, "vocab_size": 160})))
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.post_attention_layernorm.weight.mul_(100)
        layer.mlp.gate_proj.weight.mul_(5e4)
        layer.mlp.down_proj.weight.mul_(1e-5)
    model.save_pretrained(tmp_path / "base")
    tasks = mapping(plain={"kind": "generate", "samples": list(IDS), "max_new_tokens": 3})
    apply(analyse(tmp_path / "base", tasks), tmp_path / "split", ["fp16"])
    found = []
    comparing.compare(tmp_path / "split", tasks, [], found.append)
    assert math.isnan(found[0].most)
    assert math.isnan(found[0].mean)
    assert [comparing._told(found[0])[key] for key in ("most", "mean")] == [None, None]  # JSON has no NaN
    barred = torch.tensor([[1.0, -math.inf, 3.0]])
    one = comparing._compared("t", "int8", [[barred]], [[barred + 0.5]], (1, 2), Kind.GENERATE)
    assert (one.most, one.mean, one.scale) == (0.5, pytest.approx(1 / 3), pytest.approx(math.sqrt(5)))
    with pytest.raises(SplitBroken, match=r"shapes \[\[1, 2\]\] in int8, \[\[1, 3\]\] as stored"):
        comparing._compared("t", "int8", [[barred]], [[barred[:, :2]]], (1, 2), Kind.GENERATE)
    with pytest.raises(SplitBroken, match="no floating numbers"):
        comparing._compared("t", "int8", [[]], [[]], (1, 2), Kind.CALL)


def test_the_same_again_writes_nothing(family):
    """Packed files are known again by their header and digest, so that an ended run goes on where it stopped."""
    root, split, plan, tasks = family
    again = apply(analyse(root / "sentiment", tasks), split, ["bf16", "int8", "int4"])
    assert again.wrote == ()
    assert again.plan == plan


def test_a_shared_layer_that_is_an_embedding_elsewhere_is_left(family):
    """A weight that another module uses otherwise is not packed, also where that is another model."""
    del family
    one, other = torch.nn.Module(), torch.nn.Module()
    one.head = torch.nn.Linear(128, 160, bias=False)
    other.table = torch.nn.Embedding(160, 128)
    other.table.weight = one.head.weight
    other.more = torch.nn.Linear(128, 160)
    found = matrices(TaskModels({"one": one, "other": other}, {}), "int8")
    assert set(found) == {"models.other.more.weight"}
