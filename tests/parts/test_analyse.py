"""From folders to a proven split that the runtime serves: several models of one backbone, and LoRAs."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagein.catalog.split.plan import PLAN_NAME, Role
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import BadModelFile, BadUsage, DiskFull, ModelUnsuited, SplitBroken
from pagein.parts.files.check import check_split
from pagein.parts.opening import load_parts
from pagein.parts.splitting import apply as apply_module
from pagein.parts.splitting.analyse import analyse, main
from pagein.parts.splitting.analysis import Analysis, read_analysis, write_analysis
from pagein.parts.splitting.apply import apply
from pagein.parts.splitting.calling import Calls
from pagein.parts.splitting.joining import join_replacement
from pagein.parts.splitting.loading import load_whole
from tests.parts.models import IDS, family, llama, lora, mapping

pytestmark = pytest.mark.torch
TASKS = ("sentiment", "topic", "tag")


def of_family(folders: dict[str, Path]) -> Any:
    kinds = {"sentiment": "classify", "topic": "classify", "tag": "tokens"}
    tasks = {name: {"folder": str(folders[name]), "kind": kinds[name], "samples": list(IDS)} for name in TASKS}
    tasks["tag"]["class"] = "token-classification"
    tasks["sentiment"]["heads"] = ["classifier"]
    return mapping(**tasks)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the module's models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    """Three fine-tuned models of one backbone; the tagger's last layer was trained, too."""
    return family(root / "family", tuned=True)


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> Analysis:
    """Their analysis."""
    return analyse(folders["sentiment"], of_family(folders))


@pytest.fixture(scope="module")
def out(root: Path, found: Analysis) -> Path:
    """Their split, with files in bf16, too."""
    apply(found, root / "split", ["bf16"])
    return root / "split"


def reference(folder: Path) -> Any:
    """The ordinary model, its weights where an allocator puts them: products depend on that in their last bits."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return copy.deepcopy(getattr(transformers, config.architectures[0]).from_pretrained(folder)).eval()


def test_what_is_bit_identical_is_stored_once(found: Analysis) -> None:
    """The backbone is one part, each head its task's; what was trained on stays its own task's; each is proven."""
    parts = found.assignment.parts
    assert list(parts) == ["backbone", "sentiment", "tag", "topic"]
    assert {name.rpartition("classifier.")[2] for name in parts["topic"].tensors} == {"weight", "bias"}
    assert "models.tag.bert.encoder.layer.1.output.dense.weight" in parts["tag"].tensors
    assert found.sharing.apart == 1
    assert found.sharing.tensors == 75
    assert found.tasks["sentiment"].heads == {"classifier": (2, 2)}
    assert {one.compared for one in found.tasks.values()} == {2}
    assert found.groups[0].name == "shared.bert.embeddings"


def test_proofs_are_made_where_parts_will_lie(folders: dict[str, Path]) -> None:
    """Tensors begin at multiples of 64 bytes, as in a part's buffer: last bits of products depend on it."""
    whole = load_whole(folders["sentiment"], of_family(folders), lambda event, **facts: None)
    assert {one.data_ptr() % 64 for one in whole.model.state_dict(keep_vars=True).values()} == {0}


def test_the_split_serves_the_same_bits(folders: dict[str, Path], out: Path) -> None:
    """Loaded by the runtime, each task gives what its own folder's model gives, bit for bit."""
    model = load_parts(out, sweep_seconds=None)
    ids = torch.tensor([IDS[0]])
    with torch.no_grad():
        for task in TASKS:
            assert torch.equal(model(ids, task=task).logits, reference(folders[task])(ids).logits), task
    model.pagein.close()


def test_a_split_is_whole_and_says_where_it_is_from(found: Analysis, out: Path) -> None:
    """Every file is sound, the plan names sources, proof and each task's model, and no path."""
    assert not check_split(out).faults
    text = (out / PLAN_NAME).read_text()
    assert "/" not in text.replace("safetensors/", "")
    with PartsRoot(out) as opened:
        plan = read_plan(opened)
    assert plan.made["proof"] == "bit-identical"
    assert plan.tasks["tag"].inputs == {"model": "tag"}
    assert set(plan.sources) == {f"{name}.model.safetensors" for name in TASKS}
    assert json.loads((out / "tag/config.json").read_text())["architectures"] == ["BertForTokenClassification"]
    assert {precision for part in plan.parts.values() for precision in part.files} == {"stored", "bf16"}


def test_writing_again_writes_nothing(found: Analysis, out: Path) -> None:
    """A second run finds every file there and keeps it; the plan stays the same."""
    before = (out / PLAN_NAME).read_bytes()
    written = apply(found, out, ["bf16"])
    assert not written.wrote
    assert len(written.kept) == 8
    assert (out / PLAN_NAME).read_bytes() == before


def test_another_models_split_is_not_written_over(root: Path, found: Analysis, out: Path) -> None:
    """A folder with the split of another model is refused before anything of it changes."""
    other = analyse(llama(root / "other"), mapping(tag={"kind": "generate", "samples": [IDS[0]]}))
    apply(other, root / "of-other")
    shutil.copy(root / "of-other/config.json", root / "of-other/before.json")
    changed = json.loads((root / "other/config.json").read_text()) | {"use_cache": False}
    (root / "other/config.json").write_text(json.dumps(changed))
    with pytest.raises(BadUsage, match="the split of another model"):
        apply(other, root / "of-other")
    assert (root / "of-other/config.json").read_bytes() == (root / "of-other/before.json").read_bytes()
    with pytest.raises(BadUsage, match="is a folder that the split is made from"):
        apply(other, root / "other")


def test_a_source_that_changed_is_refused(root: Path, folders: dict[str, Path]) -> None:
    """Weights that are not those that were proven are never written; the file is named."""
    home = shutil.copytree(folders["topic"], root / "changed")
    task = {"kind": "classify", "samples": [IDS[0]]}
    found = analyse(home, mapping(topic=task))
    data = bytearray((home / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (home / "model.safetensors").write_bytes(data)
    with pytest.raises(SplitBroken, match=r"model\.safetensors is not what was analysed"):
        apply(found, root / "never")
    assert not (root / "never").exists()


def test_nothing_is_made_up(root: Path, folders: dict[str, Path]) -> None:
    """A folder without the head that its task's class needs is refused by the tensor's name, not filled at random."""
    task = {"folder": str(folders["sentiment"]), "kind": "tokens", "samples": [IDS[0]], "class": "question-answering"}
    with pytest.raises(BadModelFile, match=r"'qa_outputs\.bias' the first"):
        analyse(folders["sentiment"], mapping(ask=task))
    with pytest.raises(ModelUnsuited, match="no speech-seq2seq of bert"):
        analyse(folders["sentiment"], mapping(ask={**task, "class": "speech-seq2seq"}))


def test_no_code_and_no_pickles(root: Path, folders: dict[str, Path]) -> None:
    """A folder that brings code, or pickled weights alone, is refused before anything of it is loaded."""
    home = shutil.copytree(folders["topic"], root / "hostile")
    tasks = mapping(topic={"kind": "classify", "samples": [IDS[0]]})
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ModelUnsuited, match="code of its own"):
        analyse(home, tasks)
    (home / "config.json").write_text(json.dumps(config))
    (home / "model.safetensors").rename(home / "pytorch_model.bin")
    with pytest.raises(BadModelFile, match="pickles only"):
        analyse(home, tasks)


def test_a_prompt_saves_nothing(root: Path) -> None:
    """Where tasks differ by their prompts alone, it is said plainly that a split saves nothing."""
    task = {"kind": "generate", "max_new_tokens": 2}
    base = llama(root / "prompts")
    found = analyse(base, mapping(mail={**task, "samples": [IDS[0]]}, chat={**task, "samples": [IDS[1]]}))
    assert list(found.assignment.parts) == ["backbone"]
    assert found.verdict()[-1] == "the split saves nothing: every task needs the same weights"


def test_loras_are_parts(root: Path) -> None:
    """Tasks that differ by LoRA share the whole model, and each computes with its own alone."""
    base = llama(root / "base", tie_word_embeddings=True)
    generate = {"kind": "generate", "samples": list(IDS), "max_new_tokens": 4}
    tasks = mapping(
        summarize={**generate, "adapter": str(lora(root / "sum", 1))},
        mail={**generate, "adapter": str(lora(root / "mail", 2, use_rslora=True))},
        chat=generate,
    )
    calls = Calls(load_whole(base, tasks, lambda event, **facts: None), tasks.tasks)
    first = {task: calls.run(task, 0)[1] for task in tasks.tasks}
    assert not torch.equal(first["chat"], first["mail"])
    assert not torch.equal(first["summarize"], first["mail"])
    found = analyse(base, tasks)
    assert found.assignment.saves_nothing
    assert found.assignment.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    plan = apply(found, root / "llama-split").plan
    assert plan.tasks["mail"].parts == ("backbone", "mail.adapter")
    assert plan.parts["mail.adapter"].role is Role.ADAPTER
    model, whole, ids = load_parts(root / "llama-split", sweep_seconds=None), reference(base), torch.tensor([IDS[0]])
    for task, scaling in (("chat", None), ("summarize", 8 / 4), ("mail", 8 / 2)):
        logits = model(ids, task=task).logits
        expected = with_lora(copy.deepcopy(whole), root / task[:4].replace("summ", "sum"), scaling)(ids).logits
        assert torch.allclose(logits, expected, atol=1e-4), task
        assert torch.equal(logits, expected) or scaling is not None
    model.pagein.close()


def test_a_lora_joins_where_several_models_are_one(root: Path, folders: dict[str, Path]) -> None:
    """It lies where that lay whose place it takes, and again one that takes its own place."""
    base = llama(root / "one-of-two")
    tasks = mapping(
        mail={"kind": "generate", "samples": list(IDS), "max_new_tokens": 4, "adapter": str(lora(root / "first", 2))},
        topic={"kind": "classify", "folder": str(folders["topic"]), "samples": list(IDS)},
    )
    split = root / "two-split"
    apply(analyse(base, tasks), split)
    model, ids = load_parts(split, sweep_seconds=None), torch.tensor([IDS[0]])
    before = model(ids, task="mail").logits
    for part, replaces, seed in (("second", "mail.adapter", 3), ("third", "second", 4)):
        join_replacement(split, lora(root / part, seed), replaces, part)
        model.pagein.refresh()
        model.pagein.replace("mail.adapter", part)
        logits = model(ids, task="mail").logits
        assert not torch.equal(logits, before), part
        expected = with_lora(reference(base), root / part, 8 / 4)(ids).logits
        assert torch.allclose(logits, expected, atol=1e-4), part
    model.pagein.close()


def with_lora(model: Any, folder: Path, scaling: float | None) -> Any:
    """Merge a LoRA into a model's weights, as an independent reference."""
    from safetensors.torch import load_file

    if scaling is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for name in [one for one in tensors if one.endswith("lora_A.weight")]:
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
                model.get_submodule(path).weight += delta * scaling
    return model


def test_a_full_disk_is_told_before_anything_is_written(
    root: Path, found: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the split does not fit, both numbers are told and the folder is not even made."""

    def full(folder: Path, need: int) -> int:
        raise DiskFull(folder, need, 5)

    monkeypatch.setattr(apply_module, "check_space", full)
    with pytest.raises(DiskFull, match="5 B free"):
        apply(found, root / "full")
    assert not (root / "full").exists()


def test_the_process_tells_each_step(root: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The modules behind the commands print a line of JSON for each step, and errors with their code."""
    (root / "tasks.yaml").write_text("tasks:\n  topic: {folder: family/topic, kind: classify, samples: [[1, 5]]}\n")
    assert main([str(folders["topic"]), "--tasks", str(root / "tasks.yaml"), "--out", str(root / "told")]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in events] == ["loading", "traced", "proven", "analysed"]
    found = read_analysis(root / "told")
    write_analysis(root / "told", found)
    arguments = [str(root / "told"), "--out", str(root / "told")]
    assert apply_module.main([*arguments, "--dry-run"]) == 0
    assert not (root / "told" / PLAN_NAME).exists()
    assert apply_module.main(arguments) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in events] == ["loading", "forecast", "loading", "forecast", "part", "written"]
    assert apply_module.main([str(root / "family"), "--out", str(root / "told")]) == SplitBroken.exit_code
    assert json.loads(capsys.readouterr().out)["code"] == "split_broken"
