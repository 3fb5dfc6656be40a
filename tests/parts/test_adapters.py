"""Adapters belong to calls: threads with different ones never mix, and one is replaced between calls, never in one."""

from __future__ import annotations

import json
import os
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from pagein.catalog.split.plan import Role, Task
from pagein.errors import ModelUnsuited, PartRefused, SplitBroken, UnknownTask
from pagein.parts.splitting.conversions import conversion
from pagein.parts.splitting.joining import join, join_adapter, join_replacement, join_version
from tests.parts import served
from tests.parts.served import Net, factors, ids, llama, llama_with, lora, net, source, split_llama, split_net

pytestmark = pytest.mark.torch
SEEDS = {"email": 0, "grammar": 1, "plain": None}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def wholes(request):
    """Ordinary models, one for each task, its LoRA built in."""
    return request.param, {task: llama_with(seed, request.param) for task, seed in SEEDS.items()}


@torch.no_grad()
def test_each_task_has_its_adapter(tmp_path, load, wholes):
    """Logits and generated tokens are bit for bit those of the model with that LoRA built in."""
    tied, whole = wholes
    split_llama(tmp_path, llama(tied))
    model = load(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    prompt = ids()
    for _ in range(2):
        for task in SEEDS:
            assert torch.equal(model(prompt, task=task).logits, whole[task](prompt).logits)
            made = model.generate(prompt, task=task, max_new_tokens=5, do_sample=False)
            assert torch.equal(made, whole[task].generate(prompt, max_new_tokens=5, do_sample=False))
            for part in model.pagein.plan.parts:
                model.pagein.unload(part)
    with model.lease("email"):
        assert torch.equal(model(prompt).logits, whole["email"](prompt).logits)
        assert torch.equal(model(prompt, task="plain").logits, whole["plain"](prompt).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


@torch.no_grad()
def test_a_lease_has_the_adapters_of_its_task_alone(tmp_path, load, wholes):
    """In a lease the model's own modules have its adapters, too; a lease on every part has those of its task alone."""
    tied, whole = wholes
    split_llama(tmp_path, llama(tied))
    model = load(tmp_path)
    for options in ({}, {"whole": True}):
        for task in SEEDS:
            with model.lease(task, **options):
                assert torch.equal(model(ids()).logits, whole[task](ids()).logits)
                inner = model.model(ids()).last_hidden_state
                assert torch.equal(inner, whole[task].model(ids()).last_hidden_state)
    assert torch.equal(model.model(ids()).last_hidden_state, whole["plain"].model(ids()).last_hidden_state)


def test_threads_with_different_adapters_do_not_mix(tmp_path, load, wholes):
    """Threads that call three tasks at once all get their own answers, against an evictor (scenario 4)."""
    tied, whole = wholes
    split_llama(tmp_path, llama(tied))
    model = load(tmp_path)
    with torch.no_grad():
        want = {task: whole[task](ids()).logits for task in SEEDS}
    wrong, over = [], threading.Event()

    @torch.no_grad()
    def call(task: str) -> None:
        wrong.extend(task for _ in range(60) if not torch.equal(model(ids(), task=task).logits, want[task]))

    def evict() -> None:
        while not over.is_set():
            for part in model.pagein.plan.parts:
                model.pagein.unload(part)
            os.sched_yield()

    threads = [threading.Thread(target=call, args=(task,)) for task in [*SEEDS, *SEEDS]]
    evictor = threading.Thread(target=evict)
    for thread in [evictor, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    evictor.join()
    assert wrong == []


@torch.no_grad()
def test_a_saved_model_is_whole(tmp_path, load, wholes):
    """save_pretrained writes the true weights of the model, and none of the adapters' (scenario 8)."""
    tied, whole = wholes
    split_llama(tmp_path, llama(tied))
    model = load(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    again = type(llama(tied)).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids()).logits, whole["plain"](ids()).logits)


@torch.no_grad()
def test_a_layer_trained_whole_stands_in_for_one_call(tmp_path, load):
    """An adapter's own layer is used in place of the model's, in its task's calls alone."""
    whole, tuned = llama(), llama()
    head = torch.randn_like(tuned.lm_head.weight)
    tuned.lm_head.weight.copy_(head)
    split_llama(tmp_path, whole)
    task = Task("tuned", ("backbone", "head", "own"), "generate")
    served.add_part(tmp_path, "own", {"own/lm_head.weight": source(head)}, tasks={"tuned": task})
    model = load(tmp_path)
    assert torch.equal(model(ids(), task="tuned").logits, tuned(ids()).logits)
    assert torch.equal(model(ids(), task="plain").logits, whole(ids()).logits)


def write_peft(folder, seed: int, **settings) -> None:
    """Write a LoRA as PEFT does."""
    folder.mkdir()
    tensors = {}
    for name, (one, other) in factors(seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = one
        tensors[f"base_model.model.{name}.lora_B.weight"] = other
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": ["q_proj"], "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@torch.no_grad()
def test_an_adapter_joins_while_the_model_serves(tmp_path, load):
    """A PEFT folder becomes a part and a task of a running model (P12), by its next call."""
    split = tmp_path / "split"
    split.mkdir()
    split_llama(split, llama())
    model = load(split)
    write_peft(tmp_path / "peft", 7)
    join_adapter(split, tmp_path / "peft", "seven", {"seven": Task("seven", ("backbone", "head", "seven"), "generate")})
    with pytest.raises(UnknownTask):
        model(ids(), task="seven")
    model.pagein.refresh()
    assert torch.equal(model(ids(), task="seven").logits, llama_with(7)(ids()).logits)
    assert torch.equal(model(ids(), task="email").logits, llama_with(0)(ids()).logits)
    write_peft(tmp_path / "other", 8, use_dora=True)
    with pytest.raises(ModelUnsuited, match="use_dora"):
        join_adapter(split, tmp_path / "other", "eight", {})


def test_a_lora_that_goes_with_nothing_does_not_join(tmp_path):
    """A plan that has one would keep the whole model from loading: it is refused before anything is written."""
    split = tmp_path / "split"
    split.mkdir()
    split_llama(split, llama())
    before = {path.name: path.read_bytes() for path in split.iterdir()}
    write_peft(tmp_path / "peft", 7)
    path = tmp_path / "peft" / "adapter_model.safetensors"
    sound = load_file(path)
    for words, tensors in (
        ("which the split does not have", {name.replace("_proj", "_other"): one for name, one in sound.items()}),
        ("does not go with", {n: one[:, :3].contiguous() if "lora_A" in n else one for n, one in sound.items()}),
        ("does not go with", {n: one[:3].contiguous() if "lora_B" in n else one for n, one in sound.items()}),
    ):
        save_file(tensors, path)
        with pytest.raises(SplitBroken, match=words):
            join_replacement(split, tmp_path / "peft", "email-lora", "seven")
    assert {path.name: path.read_bytes() for path in split.iterdir()} == before


@torch.no_grad()
def test_a_replacement_comes_in_the_precisions_of_what_it_stands_for(tmp_path, load):
    """So that it can stand there whatever is loaded; its scaling stays exact."""
    split = tmp_path / "split"
    split.mkdir()
    split_llama(split, llama())
    join(split, "six", lora("six", 6), {}, {}, Role.ADAPTER, "email-lora", conversions=(conversion("bf16"),))
    write_peft(tmp_path / "peft", 7)
    with pytest.raises(SplitBroken, match="the folder of a PEFT LoRA"):
        join_replacement(split, tmp_path / "peft" / "adapter_model.safetensors", "six", "seven")
    written = join_replacement(split, tmp_path / "peft", "six", "seven").plan.parts["seven"]
    assert written.files.keys() == {"stored", "bf16"}
    model = load(split)
    model.pagein.replace("email-lora", "seven")
    assert torch.equal(model(ids(), task="email").logits, llama_with(7)(ids()).logits)


class Callers:
    """Threads that call one task until told to stop; every answer is told by its bits."""

    def __init__(self, model, task: str, known: dict[str, torch.Tensor]) -> None:
        self.known, self.seen, self.failed = known, set(), []
        self.over = threading.Event()
        self.model, self.task = model, task
        self.threads = [threading.Thread(target=self.call) for _ in range(6)]

    @torch.no_grad()
    def call(self) -> None:
        while not self.over.is_set():
            try:
                answer = self.answer()
            except Exception as error:
                self.failed.append(repr(error))
                return
            self.seen.add(next((name for name, one in self.known.items() if torch.equal(one, answer)), "a mixture"))

    def answer(self) -> torch.Tensor:
        found = self.model(ids(), task=self.task)
        return getattr(found, "logits", found)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def test_a_head_is_replaced_between_calls(tmp_path, load):
    """While calls run a head gives way to another version and back: each call is all-old or all-new (scenario 6)."""
    old, new = net(0), net(0)
    with torch.no_grad():
        for one in new.classify.parameters():
            one.copy_(torch.randn_like(one))
        known = {"old": old(ids(), "classify"), "new": new(ids(), "classify")}
    split_net(tmp_path, old)
    model = load(tmp_path, build=Net)
    save_file({f"classify.{name}": one for name, one in new.classify.state_dict().items()}, tmp_path / "v2.safetensors")
    join_version(tmp_path, tmp_path / "v2.safetensors", "classify", "classify-2")
    model.pagein.refresh()
    with Callers(model, "classify", known) as callers:
        for _ in range(15):
            model.pagein.replace("classify", "classify-2")
            with torch.no_grad():
                assert torch.equal(model(ids(), task="classify"), known["new"])
            model.pagein.replace("classify", "classify")
            with torch.no_grad():
                assert torch.equal(model(ids(), task="classify"), known["old"])
    assert callers.failed == []
    assert callers.seen <= {"old", "new"}
    hot = {one.part for one in model.pagein.report().parts if one.state == "hot"}
    assert len(hot & {"classify", "classify-2"}) == 1


def test_an_adapter_is_replaced_between_calls(tmp_path, load):
    """While calls run a LoRA gives way to another: each call is all-old or all-new."""
    split_llama(tmp_path, llama())
    served.add_part(tmp_path, "email-2", lora("email-2", 5), replaces="email-lora")
    model = load(tmp_path)
    with torch.no_grad():
        known = {"old": llama_with(0)(ids()).logits, "new": llama_with(5)(ids()).logits}
    with Callers(model, "email", known) as callers:
        for _ in range(6):
            model.pagein.replace("email-lora", "email-2")
            model.pagein.replace("email-lora", "email-lora")
    assert callers.failed == []
    assert callers.seen <= {"old", "new"}


def test_a_bad_new_file_leaves_the_old_one_serving(tmp_path, load):
    """A replacement whose file is damaged is refused, and the old part answers as before."""
    old = net()
    split_net(tmp_path, old)
    fresh = {name: source(torch.randn_like(one)) for name, one in old.state_dict().items() if name.startswith("tag")}
    plan = served.add_part(tmp_path, "tag-2", fresh, role=Role.SHARED, replaces="tag")
    path = tmp_path / plan.parts["tag-2"].file("stored").file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model = load(tmp_path, build=Net)
    with torch.no_grad():
        model.pagein.warm("tag")
        with pytest.raises(PartRefused, match="digest"):
            model.pagein.replace("tag", "tag-2")
        assert torch.equal(model(ids(), task="tag"), old(ids(), "tag"))
        # Damaged after it was proven: the call finds that out, and goes on with the old one.
        model.pagein.residency.replace("tag", "tag-2")
        assert torch.equal(model(ids(), task="tag"), old(ids(), "tag"))
    with pytest.raises(PartRefused, match="does not stand"):
        model.pagein.replace("score", "tag-2")
    save_file({"tag.weight": torch.ones(5, 16)}, tmp_path / "half.safetensors")
    with pytest.raises(SplitBroken, match="cannot stand for"):
        join_version(tmp_path, tmp_path / "half.safetensors", "tag", "tag-3")
