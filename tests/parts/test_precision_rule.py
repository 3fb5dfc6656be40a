"""Which precision each part is used in: by the rule of the device, by hand, and never two types in one computation."""

from __future__ import annotations

import hashlib

import pytest

from pagein.catalog.split.kinds import kind_of
from pagein.catalog.split.names import file_name
from pagein.catalog.split.packed import LAYOUTS, PRECISIONS, packed_of
from pagein.catalog.split.plan import Model, Part, PartFile, Role, SplitPlan, Task, TensorEntry, encode
from pagein.catalog.split.precision import FLOATS, check_together, choose, extend, sizes_of
from pagein.catalog.split.reader import parse_plan
from pagein.errors import BadUsage, ModelUnsuited, PlanRefused, UnknownPart
from tests.parts.build import SHA

KINDS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "U8": 1, "I8": 1}


def entry(dtype: str, *shape: int) -> TensorEntry:
    count = 1
    for side in shape:
        count *= side
    return TensorEntry(shape, dtype, count * WIDTHS[dtype])


def file(name: str, precision: str, tensors: dict[str, TensorEntry], layout: str | None = None) -> PartFile:
    digest = hashlib.sha256(f"{name} {precision}".encode()).hexdigest()
    return PartFile(file_name(name, digest), 4096 + sum(one.nbytes for one in tensors.values()), digest,
                    tensors, layout)  # fmt: skip


def part(
    name: str, rows: int, have: str, stored: str = "F32", role: Role = Role.TASK, replaces: str | None = None,
    tensor: str | None = None,
) -> Part:  # fmt: skip
    """A part of one matrix [rows, 64] and a norm, with files in the precisions that ``have`` lists."""
    stem = tensor or name
    files = {}
    for one in have.split():
        kind = KINDS.get(one, stored)
        tensors = {f"{stem}.weight": entry(kind, rows, 64), f"{stem}.norm": entry(kind, 64)}
        if one in PRECISIONS:
            wide = one == "int8"
            scales = entry("BF16", rows) if wide else entry("BF16", 1, rows, 2)
            tensors[f"{stem}.weight_packed"] = entry("I8", rows, 64) if wide else entry("U8", rows, 32)
            tensors[f"{stem}.weight_scales"] = scales
            del tensors[f"{stem}.weight"]
        files[one] = file(name, one, tensors, LAYOUTS[0] if one == "int4" else None)
    return Part(name, role, (), files, replaces)


def plan(*parts: Part, tasks: dict[str, tuple[str, ...]] | None = None) -> SplitPlan:
    found = {one.name: one for one in parts}
    if tasks is None:
        heads = [one.name for one in parts if one.role is Role.TASK and one.replaces is None]
        tasks = {name: ("backbone", name) for name in heads} or {"t": ("backbone",)}
    named = {name: Task(name, members, "tokens") for name, members in tasks.items()}
    users = {name: tuple(sorted(task for task, one in named.items() if name in one.parts)) for name in found}
    whole = {name: Part(name, one.role, users[name], one.files, one.replaces) for name, one in found.items()}
    made = SplitPlan(Model("tests.Net", SHA), {}, named, whole)
    return parse_plan(encode(made))


ALL = "stored bf16 fp16 int8 int4"


def backbone(have: str = ALL, rows: int = 1024, stored: str = "F32") -> Part:
    return part("backbone", rows, have, stored, Role.BACKBONE)


@pytest.mark.parametrize(
    ("device", "have", "stored", "taken"),
    [
        ("cpu", ALL, "F32", "bf16"),
        ("cpu", "stored fp16 int8", "F32", "stored"),
        ("cuda", ALL, "F32", "bf16"),
        ("cuda", "stored fp16", "F32", "fp16"),
        ("cuda without bf16", ALL, "F32", "fp16"),
        ("cuda without bf16", "stored bf16", "F32", "bf16"),
        ("cuda", "stored int8 int4", "F32", "stored"),
        ("cpu", "stored fp16", "BF16", "stored"),
        ("mps", ALL, "F32", "stored"),
    ],
)
def test_the_devices_own_type_is_taken(device, have, stored, taken):
    """A CPU takes bf16, CUDA bf16 or fp16, where it is there; packed ones never unasked while all fits."""
    found = plan(backbone(have, stored=stored), part("head", 64, have, stored))
    assert set(choose(found, "auto", device).values()) == {taken}
    assert set(choose(found, "auto", device, memory=2**40).values()) == {taken}
    check_together(found, choose(found, "auto", device))


def test_all_parts_or_none():
    """A type that one part lacks is taken by none; one that a part is of as stored is not lacking."""
    mixed = plan(backbone("stored bf16 int8"), part("head", 64, "stored int8"))
    assert set(choose(mixed, "auto").values()) == {"stored"}
    with pytest.raises(
        ModelUnsuited, match=r"'head' .*part 'backbone' in BF16 \(bf16\) and part 'head' in F32 \(stored"
    ):
        check_together(mixed, choose(mixed, "bf16"))
    half = plan(backbone("stored bf16"), part("head", 64, "stored", "BF16"))
    assert choose(half, "auto") == {"backbone": "bf16", "head": "stored"}
    check_together(half, choose(half, "auto"))


def test_packed_only_where_it_does_not_fit_otherwise():
    """With a limit: the largest part in int8 first, then the next, then in int4; no more of them than needed."""
    found = plan(backbone("stored int8 int4"), part("head", 512, "stored int8 int4"), part("other", 64, "stored int8"))
    stored = sizes_of(found, choose(found, "stored"))
    int8 = sizes_of(found, choose(found, "int8"))
    both = stored["backbone"] + stored["head"]
    assert choose(found, "auto", memory=both) == {"backbone": "stored", "head": "stored", "other": "stored"}
    assert choose(found, "auto", memory=both - 1) == {"backbone": "int8", "head": "stored", "other": "stored"}
    tight = int8["backbone"] + int8["head"]
    assert choose(found, "auto", memory=tight) == {"backbone": "int8", "head": "int8", "other": "stored"}
    assert choose(found, "auto", memory=tight - 1) == {"backbone": "int4", "head": "int8", "other": "stored"}
    least = choose(found, "auto", memory=1)
    assert least == {"backbone": "int4", "head": "int4", "other": "int8"}
    for memory in (both - 1, tight, tight - 1, 1):
        check_together(found, choose(found, "auto", memory=memory))


def test_what_one_task_needs_in_fewer_bits_stays_so_for_the_next():
    """A backbone that one task needs in int4 is not put back into int8 for another, whose own part then fits."""
    found = plan(
        part("backbone", 1024, "stored int8 int4", role=Role.BACKBONE),
        part("a", 260, "stored"),
        part("b", 1200, "stored int8 int4"),
    )
    b, base = found.parts["b"].files, found.parts["backbone"].files
    memory = b["int4"].nbytes + base["int8"].nbytes
    assert found.parts["a"].files["stored"].nbytes + base["int8"].nbytes > memory
    forms = choose(found, "auto", "cpu", memory)
    assert forms == {"backbone": "int4", "a": "stored", "b": "int4"}
    assert all(sum(sizes_of(found, forms)[one] for one in task.parts) <= memory for task in found.tasks.values())


def test_bf16_gives_way_to_packed_ones_together():
    """Parts in 8 bits are as stored beside their matrices: where some are needed, no other part stays in bf16."""
    found = plan(backbone("stored bf16 int8"), part("head", 64, "stored bf16"))
    limit = sum(sizes_of(found, choose(found, "bf16")).values())
    assert set(choose(found, "auto", memory=limit).values()) == {"bf16"}
    small = choose(found, "auto", memory=limit - 1)
    assert small == {"backbone": "int8", "head": "stored"}
    check_together(found, small)
    none = plan(backbone("stored bf16"), part("head", 64, "stored bf16"))
    assert set(choose(none, "auto", memory=1).values()) == {"bf16"}


def test_mixtures_of_the_model_itself_are_its_own():
    """A model that was stored in two types computes in both: what its split proved is not refused."""
    found = plan(backbone("stored int8", stored="BF16"), part("head", 64, "stored fp32 int8", "F32"))
    for wanted in ("stored", "int8"):
        check_together(found, choose(found, wanted))
    with pytest.raises(ModelUnsuited, match="one type"):
        check_together(
            plan(backbone("stored"), part("head", 64, "stored bf16")), {"backbone": "stored", "head": "bf16"}
        )


def test_what_stands_in_anothers_place_comes_in_its_form():
    """A place is packed for all that can stand there, or for none; by hand a replacement follows its part."""
    tasks = {"head": ("backbone", "head")}
    new = part("head-2", 64, "stored", replaces="head", tensor="head")
    lacking = plan(backbone(), part("head", 64, ALL), new, tasks=tasks)
    assert choose(lacking, "int8") == {"backbone": "int8", "head": "stored", "head-2": "stored"}
    assert choose(lacking, "auto", memory=1)["head"] == "stored"
    new = part("head-2", 64, ALL, replaces="head", tensor="head")
    whole = plan(backbone(), part("head", 64, ALL), new, tasks=tasks)
    assert set(choose(whole, "int4").values()) == {"int4"}
    assert choose(whole, {"head": "int8"}) == {"backbone": "stored", "head": "int8", "head-2": "int8"}
    joined = extend(whole, {"backbone": "int4", "head": "int8"}, "bf16")
    assert joined == {"backbone": "int4", "head": "int8", "head-2": "int8"}
    assert extend(lacking, {"backbone": "int8", "head": "int8"}, "int8")["head-2"] == "stored"


def test_adapters_take_part_in_any_type():
    """A LoRA casts what goes in and out, so that its own type is nobody's concern; a layer brought whole is."""
    tensors = {"lora/x.lora_A.weight": entry("F32", 4, 64), "lora/x.lora_B.weight": entry("F32", 64, 4),
               "lora/x.scaling": entry("F64", 1)}  # fmt: skip
    lora = Part("lora", Role.ADAPTER, (), {"stored": file("lora", "stored", tensors)})
    assert kind_of(lora, "stored") is None
    own = {"own/x.weight": entry("F32", 64, 64)}
    own = Part("own", Role.ADAPTER, (), {"stored": file("own", "stored", own)})
    found = plan(backbone(), part("head", 64, ALL), lora, tasks={"head": ("backbone", "head", "lora")})
    assert choose(found, "auto") == {"backbone": "bf16", "head": "bf16", "lora": "stored"}
    check_together(found, choose(found, "auto"))
    found = plan(backbone(), part("head", 64, ALL), own, tasks={"head": ("backbone", "head", "own")})
    assert set(choose(found, "auto").values()) == {"stored"}
    with pytest.raises(ModelUnsuited, match="'own' in F32"):
        check_together(found, choose(found, "bf16"))


def test_what_is_not_there_is_refused():
    """A word that is no precision, one that no part has, and one that a named part lacks are told apart."""
    found = plan(backbone("stored bf16"), part("head", 64, "stored"))
    with pytest.raises(BadUsage, match="int3"):
        choose(found, "int3")
    with pytest.raises(UnknownPart, match="int8"):
        choose(found, "int8")
    with pytest.raises(UnknownPart, match="bf16"):
        choose(found, {"head": "bf16"})
    with pytest.raises(UnknownPart, match="tail"):
        choose(found, {"tail": "bf16"})
    assert set(FLOATS) == {"cpu", "cuda", "cuda without bf16"}


def broken(change) -> SplitPlan:
    """A plan with a packed file that was changed."""
    body = backbone("stored int4")
    tensors, layout = change(dict(body.files["int4"].tensors))
    files = {**body.files, "int4": file("backbone", "int4", tensors, layout)}
    return plan(Part("backbone", Role.BACKBONE, (), files))


SCALES = "backbone.weight_scales"


def without(name: str):
    return lambda tensors: ({key: one for key, one in tensors.items() if key != name}, LAYOUTS[0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("backbone.weight_scales"), "belong together"),
        (without("backbone.norm"), "other tensors than"),
        (lambda tensors: (tensors, None), "no layout"),
        (lambda tensors: (tensors, "halves65"), "no layout"),
        (lambda tensors: ({**tensors, SCALES: entry("BF16", 4, 1024, 2)}, LAYOUTS[0]), "do not belong"),
        (lambda tensors: ({**tensors, SCALES: entry("F16", 1, 1024, 2)}, LAYOUTS[0]), "no packed weight"),
        (lambda tensors: ({**tensors, "backbone.weight": entry("F32", 1024, 64)}, LAYOUTS[0]), "twice"),
        (
            lambda tensors: (
                {
                    **tensors,
                    "backbone.weight_packed": entry("U8", 512, 32),
                    "backbone.weight_scales": entry("BF16", 1, 512, 2),
                },
                LAYOUTS[0],
            ),
            "has the shape",
        ),
        (lambda tensors: ({**tensors, "backbone.norm": entry("F32", 65)}, LAYOUTS[0]), "has the shape"),
    ],
)  # fmt: skip
def test_a_packed_file_that_does_not_fit_itself_is_refused(change, why):
    """Kernels ask no questions about sizes: codes, scales and layout must belong together, and tensors be the same."""
    assert broken(lambda tensors: (tensors, LAYOUTS[0])).parts["backbone"].files["int4"].layout == LAYOUTS[0]
    with pytest.raises(PlanRefused, match=why):
        broken(change)


def test_packed_weights_are_found_by_their_names():
    """Codes and scales of one weight are one; other precisions' tensors may be called as they like."""
    made = backbone()
    assert set(packed_of("int4", made.files["int4"])) == {"backbone.weight"}
    one = packed_of("int8", made.files["int8"])["backbone.weight"]
    assert (one.rows, one.width, one.bits, one.group) == (1024, 64, 8, None)
    assert packed_of("bf16", made.files["bf16"]) == {}
