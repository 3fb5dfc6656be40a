"""Split models in the catalog: told by their plan, no weight is read; what they are given, what they can do with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagein.catalog import engines, resolve
from pagein.catalog.allot import DAEMON_BYTES, allot
from pagein.catalog.estimate_parts import WATERMARK, beside, part_sizes
from pagein.catalog.inspect import inspect
from pagein.catalog.model import Format, ModelEntry, NeedSource
from pagein.catalog.observed import PeakStore
from pagein.catalog.split.facts import KIND_CAPABILITIES, PartFacts, SplitFacts, TaskFacts, facts_of
from pagein.catalog.split.plan import PLAN_NAME, Model, Role, SplitPlan, Task, encode
from pagein.catalog.split.precision import choose, sizes_of
from pagein.config.schema import Model as Settings
from pagein.errors import BadModelFile, UnknownPart, UnknownTask
from pagein.memory.snapshot import MachineSnapshot, PoolReading
from pagein.parts.guard import Admit, Guard, GuardRules
from pagein.parts.splitting.making import PartMaking
from pagein.parts.splitting.tasks import Kind
from pagein.parts.splitting.writing import write_split
from pagein.protocol import Capability
from tests.parts.build import SHA, TASKS, make, split

GIB = 1024**3
MIB = 1024**2
MACHINE = MachineSnapshot({"ram": PoolReading("ram", 64 * GIB, None, "test")})
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": 40, "intermediate_size": 128,
}  # fmt: skip

Resolve = Callable[..., ModelEntry]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small split model, with the configuration of a decoder beside it."""
    split(tmp_path / "split")
    (tmp_path / "split" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "split"


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Resolve a folder with settings, as if every engine were installed."""
    monkeypatch.setattr(engines, "version", lambda name: "1.0")
    peaks = PeakStore.open(tmp_path / "peaks.sqlite")

    def act(folder: Path, machine: MachineSnapshot = MACHINE, **settings: Any) -> ModelEntry:
        return resolve.resolve("m", Settings(model=folder, **settings), machine, peaks)

    return act


# ── what it is ──────────────────────────────────────────────────────────────────────────────


def test_a_plan_makes_a_split_model(folder: Path) -> None:
    """Tasks, parts and their bytes are those of the plan; the geometry is that of the configuration beside it."""
    info = inspect(folder)
    plan = split(folder)  # the same again: every file is kept
    assert (info.format, info.path, info.split and info.split.digest) == (Format.SPLIT, folder, plan.digest)
    assert info.split is not None
    assert {name: task.parts for name, task in info.split.tasks.items()} == {n: t.parts for n, t in TASKS.items()}
    assert info.split.tasks["tag"].capabilities == {Capability.TOKEN_CLASSIFICATION}
    assert info.split.parts["backbone"].role == Role.BACKBONE
    assert info.split.parts["both"].tasks == ("summarize", "tag")
    sizes = {name: part.size() for name, part in info.split.parts.items()}
    assert sizes == {name: part.file("stored").nbytes for name, part in plan.parts.items()}
    assert info.weight_bytes == sum(sizes.values()) == info.file_bytes
    assert (info.layers, info.context_train, info.architecture) == (2, 512, "llama")
    assert info.metadata["missing"] == {}


def test_every_kind_of_task_is_served_or_is_known_not_to_be() -> None:
    """The table of capabilities has the kinds that a mapping may name; only what calls any method is no service."""
    assert set(KIND_CAPABILITIES) == set(Kind) - {Kind.CALL}


def test_names_of_any_case_are_found(folder: Path) -> None:
    """Tasks and parts are told apart as the plan does it: ASCII letters of one case."""
    found = inspect(folder).split
    assert found is not None
    assert (found.task("Summarize"), found.part("BOTH")) == ("summarize", "both")
    with pytest.raises(UnknownTask, match="embed, summarize, tag"):
        found.task("ſummarize")  # folded by Unicode, it would be one
    with pytest.raises(UnknownPart, match=r"'\.\./both'"):
        found.part("../both")


@pytest.mark.parametrize("wanted", ["stored", "bf16", "int8", "auto", {"summarize": "bf16"}, {"tag": "stored"}])
def test_sizes_are_those_of_the_precision_that_is_used(tmp_path: Path, wanted: object) -> None:
    """What is counted for each part is what the engine will take by its rules, also in what stands in its place."""
    making = make(precisions=True)
    later = replace(making.parts["summarize"], replaces="summarize", tensors=("sum.weight",))
    plan = write_split(tmp_path / "s", make(precisions=True, parts={**making.parts, "later": later})).plan
    found = inspect(tmp_path / "s").split
    assert found is not None
    if wanted == "int8":
        assert part_sizes(found, {"precision": wanted}) == part_sizes(found, {})  # no part has that
    else:
        assert part_sizes(found, {"precision": wanted}) == sizes_of(plan, choose(plan, wanted))


def test_the_least_is_that_of_packed_parts_where_the_engine_may_choose(tmp_path: Path) -> None:
    """With ``auto`` the engine takes packed files where memory is short; with another precision it does not."""
    plan = split(tmp_path / "s")
    facts = facts_of(plan)
    small = {name: replace(part, bytes={**part.bytes, "int8": 100}) for name, part in facts.parts.items()}
    facts = replace(facts, parts=small)
    assert set(part_sizes(facts, {"precision": "auto"}, fewest=True).values()) == {100}
    assert part_sizes(facts, {"precision": "auto"}) == part_sizes(facts, {}) == part_sizes(facts, {}, fewest=True)


def _facts(*parts: PartFacts) -> SplitFacts:
    names = ("backbone", *"abcd"[: len(parts) - 1])
    tasks = {name: TaskFacts("tokens", ("backbone", name), frozenset()) for name in names[1:]}
    return SplitFacts("0", tasks, dict(zip(names, parts, strict=True)))


def test_auto_is_counted_as_the_engine_chooses() -> None:
    """bf16 files are used beside parts that are of that type, or of none, without one; packed parts beside stored."""
    lora = PartFacts("adapter", {"stored": 10}, ())
    own = PartFacts("task", {"stored": 20}, (), kind="BF16")
    full = PartFacts("backbone", {"stored": 400, "bf16": 200, "int8": 110, "int4": 60}, (), kind="F32")
    auto: dict[str, object] = {"precision": "auto"}
    assert part_sizes(_facts(full, lora, own), auto) == {"backbone": 200, "a": 10, "b": 20}
    assert part_sizes(_facts(full, replace(own, kind="F32")), auto) == {"backbone": 400, "a": 20}
    halves = replace(full, bytes={"stored": 400, "fp16": 201})
    assert part_sizes(_facts(halves, lora), auto, "gpu0") == {"backbone": 201, "a": 10}
    assert part_sizes(_facts(halves, lora), auto, "cpu") == {"backbone": 400, "a": 10}
    head = PartFacts("task", {"stored": 300, "bf16": 150}, (), kind="F32")
    assert part_sizes(_facts(full, head), auto, fewest=True) == {"backbone": 200, "a": 150}  # 60 + 300 are more
    head = replace(head, bytes={"stored": 60, "bf16": 30})
    assert part_sizes(_facts(full, head), auto, fewest=True) == {"backbone": 60, "a": 60}
    assert part_sizes(_facts(full, head), {"precision": {"BackBone": "int8"}}) == {"backbone": 110, "a": 60}


def test_several_models_of_one_backbone_count_as_their_largest(tmp_path: Path) -> None:
    """Each task's own configuration lies beside the plan; what costs most of any of them is counted."""
    tasks = {
        "summarize": Task("summarize", ("backbone", "both", "summarize"), "generate", {"model": "one"}),
        "tag": Task("tag", ("backbone", "both", "tag"), "tokens", {"model": "two"}),
    }
    write_split(tmp_path / "s", make(tasks=tasks, model=Model("TaskModels", SHA)))
    for name, changes in (("one", {"num_hidden_layers": 7}), ("two", {"vocab_size": 9000, "is_encoder_decoder": True})):
        (tmp_path / "s" / name).mkdir()
        (tmp_path / "s" / name / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    info = inspect(tmp_path / "s")
    assert (info.layers, info.vocabulary) == (7, 9000)
    assert info.metadata["encoder_decoder"] is True


# ── what nobody vouches for ─────────────────────────────────────────────────────────────────


def _in_place(folder: Path, data: bytes) -> None:
    (folder / PLAN_NAME).write_bytes(data)


def _link(folder: Path) -> None:
    (folder / PLAN_NAME).rename(folder.parent / "elsewhere.json")
    (folder / PLAN_NAME).symlink_to(folder.parent / "elsewhere.json")


def _directory(folder: Path) -> None:
    (folder / PLAN_NAME).unlink()
    (folder / PLAN_NAME).mkdir()


def _pipe(folder: Path) -> None:
    (folder / PLAN_NAME).unlink()
    os.mkfifo(folder / PLAN_NAME)


def _outside(folder: Path) -> None:
    text = (folder / PLAN_NAME).read_text()
    _in_place(folder, text.replace('"inputs":{"text":"text"}', '"inputs":{"model":"../../etc"}').encode())


def _circle(folder: Path) -> None:
    text = (folder / PLAN_NAME).read_text()
    _in_place(folder, text.replace('"inputs":{"text":"text"}', '"inputs":{"model":"circle"}').encode())
    (folder / "circle").symlink_to("circle")


def _no_backbone(folder: Path) -> None:
    next(folder.glob("backbone-*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: _in_place(folder, b""), "is not valid JSON"),
        (lambda folder: _in_place(folder, b'{"version": 2}'), "has version 2"),
        (lambda folder: _in_place(folder, b"[" * 1_000_000), "has 1000000 items"),
        (lambda folder: _in_place(folder, b" " * 17_000_000), "has 17000000 bytes"),
        (lambda folder: _in_place(folder, b"[" * 300_000), "is not valid JSON"),
        (_link, "is a link"),
        (_directory, "is a folder"),
        (_pipe, "is a named pipe"),
        (_outside, "names the folder '../../etc'"),
        (_circle, "names the folder 'circle'"),
        (_no_backbone, "its backbone cannot be loaded"),
    ],
    ids=["empty", "newer", "items", "long", "deep", "link", "folder", "pipe", "outside", "circle", "no backbone"],
)
def test_a_damaged_or_hostile_plan_is_a_problem_with_a_reason(
    folder: Path, of: Resolve, damage: Callable[[Path], None], words: str
) -> None:
    """It is refused with words, never taken for a plain folder of safetensors, and never stops the daemon."""
    damage(folder)
    with pytest.raises(BadModelFile, match=words):
        inspect(folder)
    entry = of(folder)
    assert entry.problem is not None
    assert words in entry.problem
    assert entry.split is None


def test_a_long_chain_of_replacements_is_no_recursion(tmp_path: Path, of: Resolve) -> None:
    """Parts may stand in each other's place one after the other, as often as a plan has parts."""
    split(tmp_path / "s")
    text = json.loads((tmp_path / "s" / PLAN_NAME).read_bytes())
    before = "tag"
    for number in range(1000):
        name = f"v{number:04}"
        file = json.loads(json.dumps(text["parts"]["tag"]["files"]["stored"]))
        file["file"] = f"{name}-{file['sha256'][:12]}.safetensors"
        text["parts"][name] = {"role": "task", "tasks": [], "files": {"stored": file}, "replaces": before}
        before = name
    (tmp_path / "s" / PLAN_NAME).write_text(json.dumps(text))
    assert of(tmp_path / "s").problem is None


def test_a_part_that_is_away_leaves_the_others_in_service(folder: Path, of: Resolve) -> None:
    """Only the tasks that need it are refused, by the worker; the catalog names it."""
    file = next(folder.glob("tag-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    entry = of(folder)
    assert entry.problem is None
    assert entry.info is not None
    missing = entry.info.metadata["missing"]
    assert isinstance(missing, dict)
    assert set(missing) == {"tag"}
    assert "the plan says" in missing["tag"]


def test_an_unfinished_split_is_no_model(folder: Path, of: Resolve) -> None:
    """Parts without their plan are not loaded as if they were a model of shards."""
    (folder / PLAN_NAME).unlink()
    assert "its split is not finished" in (of(folder).problem or "")


# ── what it is for the daemon ───────────────────────────────────────────────────────────────


def test_it_is_served_by_the_parts_engine(folder: Path, of: Resolve) -> None:
    """Engine, capabilities and facts follow from the plan; it computes where every PyTorch can."""
    entry = of(folder)
    assert (entry.engine, entry.device, entry.context, entry.problem) == ("parts", "cpu", 512, None)
    kinds = {Capability.CHAT, Capability.COMPLETION, Capability.TOKEN_CLASSIFICATION, Capability.EMBEDDING}
    assert entry.capabilities == kinds
    assert entry.split is not None
    assert set(entry.split.tasks) == set(TASKS)
    assert entry.need.source is NeedSource.ESTIMATED


def test_another_engine_does_not_take_it(folder: Path, of: Resolve) -> None:
    """A split folder is no folder of safetensors for the transformers engine, and the other way round."""
    assert "takes safetensors" in (of(folder, engine="transformers").problem or "")
    assert of(folder, engine="transformers").split is None
    plain = folder.parent / "plain"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(next(folder.glob("tag-*.safetensors")).read_bytes())
    assert "make one with 'pagein split'" in (of(plain, engine="parts").problem or "")


def test_tasks_that_only_a_program_can_call_are_not_served(tmp_path: Path, of: Resolve) -> None:
    """A model of nothing but those says so before it is loaded."""
    tasks = {name: Task(name, task.parts, "call", task.inputs) for name, task in TASKS.items()}
    write_split(tmp_path / "s", make(tasks=tasks))
    assert "none is served" in (of(tmp_path / "s").problem or "")


def test_with_all_it_asks_for_nothing_has_to_leave(folder: Path, of: Resolve) -> None:
    """The estimate holds all parts below the bytes at which the guard begins to let idle ones go."""
    entry = of(folder)
    assert entry.info is not None
    assert entry.split is not None
    assert GuardRules().start == WATERMARK
    for_parts = entry.need.bytes["ram"] - beside(entry.info, entry.context, 2, "cpu")
    assert sum(part.size() for part in entry.split.parts.values()) <= WATERMARK * for_parts


def test_with_the_least_every_task_can_be_called(tmp_path: Path, of: Resolve) -> None:
    """The backbone and any one task's parts fit together, also where another version stands in a part's place."""
    large = PartMaking(Role.TASK, ("tag.other",), replaces="tag")
    making = make()
    tensors = {**making.tensors, "tag.other": making.tensors["body.weight"]}
    plan = write_split(tmp_path / "s", make(tensors=tensors, parts={**making.parts, "tag-v2": large})).plan
    entry = of(tmp_path / "s")
    assert entry.info is not None
    assert entry.least is not None
    allowance = entry.least - beside(entry.info, entry.context, 2, "cpu")
    for task in plan.tasks.values():
        _fits(plan, task.parts, allowance)
    _fits(plan, ("backbone", "both", "tag-v2"), allowance)


def _fits(plan: SplitPlan, parts: tuple[str, ...], allowance: int) -> None:
    guard = Guard(allowance)
    for part in parts:
        nbytes = plan.parts[part].file("stored").nbytes
        assert guard.ask(part, nbytes, 0.0) == Admit(), (part, nbytes, allowance)
        guard.reserve(part, nbytes, 0.0)
        guard.confirm(part, 0.0, 0.1)
        guard.take(part, 0.0)


def test_only_tasks_that_write_take_a_cache(tmp_path: Path, of: Resolve) -> None:
    """KV is counted for requests that generate; a model that only classifies has none."""
    split(tmp_path / "s")
    (tmp_path / "s" / "config.json").write_text(json.dumps(CONFIG))
    writes = of(tmp_path / "s")
    tasks = {name: Task(name, task.parts, "classify") for name, task in TASKS.items()}
    write_split(tmp_path / "t", make(tasks=tasks))
    (tmp_path / "t" / "config.json").write_text(json.dumps(CONFIG))
    reads = of(tmp_path / "t")
    assert "KV" in writes.need.explanation
    assert "KV" not in reads.need.explanation
    assert writes.need.bytes["ram"] > reads.need.bytes["ram"]


def test_on_a_gpu_parts_are_in_its_pool(folder: Path, of: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes is counted where it computes; the host has the process, and the part that is being loaded."""
    monkeypatch.setattr(resolve, "computes_on_gpu", lambda row, options: True)
    gpu = PoolReading("cuda:0", 24 * GIB, None, "test")
    entry = of(folder, MachineSnapshot({**MACHINE.pools, "cuda:0": gpu}), device="cuda:0")
    on_cpu = of(folder)
    assert (entry.pool, entry.problem) == ("cuda:0", None)
    assert entry.info is not None
    assert entry.split is not None
    assert entry.least is not None
    assert entry.need.bytes["cuda:0"] > beside(entry.info, 512, 2, "cuda:0") + entry.info.weight_bytes
    assert entry.need.bytes["ram"] > on_cpu.need.bytes["ram"]  # the drivers' share of the process is larger
    assert "a part that is being loaded" in entry.need.explanation
    unified = MachineSnapshot({**MACHINE.pools, "cuda:0": gpu}, unified=True)
    assert "whose memory is the CPU's" in (of(folder, unified, device="cuda:0").problem or "")


def test_it_is_given_half_where_all_does_not_fit(folder: Path, of: Resolve) -> None:
    """Like a model that streams: less than all of it is enough, and the words say what it keeps within."""
    entry = of(folder)
    assert entry.least is not None
    budget = entry.estimate.bytes["ram"] - 1 + DAEMON_BYTES
    given = allot({"m": entry}, {"m": Settings(model=folder)}, {"ram": budget})["m"]
    assert given.need.bytes["ram"] == entry.least
    assert "keeps its parts within" in given.need.explanation


def test_a_measured_peak_is_no_need_of_it(folder: Path, tmp_path: Path, of: Resolve) -> None:
    """It keeps within what it is given, so having taken much once says nothing of the next load."""
    entry = of(folder)
    peaks = PeakStore.open(tmp_path / "peaks.sqlite")
    peaks.remember(entry.peak_key, "m", {"ram": 60 * GIB}, 1.0)
    assert of(folder).need == entry.need


def test_a_new_part_is_another_identity(folder: Path, of: Resolve) -> None:
    """What is remembered of a model hangs on its plan, which names every file by its digest."""
    before = of(folder)
    plan = split(folder, "another")
    (folder / PLAN_NAME).write_bytes(encode(plan))
    assert of(folder).peak_key != before.peak_key
