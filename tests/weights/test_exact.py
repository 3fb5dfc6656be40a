"""A streamed model computes the very bits of a full load."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

KINDS = ["llama", "llama-tied", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3-moe", "gpt2", "t5"]
SHARES = [1.0, 0.7, 0.45]
"""All resident; some blocks streamed; the head in tiles too."""


def full_load(folder: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype="auto").eval()


def inputs_of(model: Any) -> dict[str, Any]:
    ids = torch.randint(0, 512, (2, 19), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}
    return {**given, "decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else given


@torch.inference_mode()
def compare(folder: Any, model: Any) -> None:
    full = full_load(folder)
    given = inputs_of(full)
    assert torch.equal(model(**given).logits, full(**given).logits)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(given["input_ids"], **settings), full.generate(given["input_ids"], **settings))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_text_equal_a_full_load(make_model: Any, load: Any, kind: str, share: float) -> None:
    """Every kind of model gives the same bits whether it is resident, streamed, or streamed with its head in tiles."""
    folder = make_model(kind)
    model = load(folder, share)
    assert model.pagein.plan.fits_whole == (share == 1.0)
    compare(folder, model)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_dtype_is_computed_as_stored(make_model: Any, load: Any, dtype: str) -> None:
    """A checkpoint in fp16 or fp32 runs in that dtype, with the bits of a full load."""
    folder = make_model("llama", dtype)
    compare(folder, load(folder, 0.5))


def test_one_file_without_an_index_runs(make_model: Any, load: Any) -> None:
    """A folder with only model.safetensors runs and matches a full load (airllm #185)."""
    folder = make_model("qwen2", shards="1GB")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not (folder / "model.safetensors.index.json").exists()
    compare(folder, load(folder, 0.5))


def test_a_layer_across_shards_runs(make_model: Any, load: Any) -> None:
    """A block whose tensors lie in several files gives the bits of a full load (airllm 0a88464)."""
    folder = make_model("llama")
    model = load(folder, 0.5)
    files = {extent.file for unit in model.pagein._placement.stream.units for extent in unit.layout.extents}
    assert len(files) > len(model.pagein._placement.stream.units)
    compare(folder, model)


def test_another_dtype_than_stored_equals_a_load_in_it(make_model: Any, load: Any) -> None:
    """dtype= casts every weight as transformers casts it."""
    folder = make_model("llama", "float32")
    model = load(folder, 0.6, dtype="bfloat16")
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = inputs_of(full)["input_ids"]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, full(ids).logits)


def test_several_prompts_in_step_equal_single_runs(make_model: Any, load: Any) -> None:
    """Prompts of different lengths that share each pass give what each gives alone, sampling included."""
    folder = make_model("llama")
    model = load(folder, 0.5)
    prompts = [torch.arange(2, 2 + size)[None] for size in (3, 9, 17)]

    def job(prompt: Any) -> Any:
        return lambda: model.generate(prompt, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)

    with torch.inference_mode():
        alone = [job(prompt)() for prompt in prompts]
        ring = model.pagein._placement.stream.ring
        before = ring.counts.units
        together = model.pagein.lockstep.run([job(prompt) for prompt in prompts])
        passes = (ring.counts.units - before) / len(ring.layouts)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert passes == 7, "three prompts took as many weight passes as one"


def test_a_prompt_in_chunks_takes_one_pass_a_chunk(make_model: Any, load: Any) -> None:
    """n tokens of a prompt cost n / chunk passes, rounded up; m new ones cost m - 1 more (colibri #905, #492)."""
    model = load(make_model("llama"), 0.5, chunk=8)
    ring = model.pagein._placement.stream.ring
    with torch.inference_mode():
        model.generate(torch.arange(2, 32)[None], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ring.counts.units / len(ring.layouts) == 4 + 4


def test_nothing_is_written(make_model: Any, load: Any) -> None:
    """A model runs straight from the downloaded shards: no second copy, no index, nothing (airllm #179)."""
    folder = make_model("llama")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    model = load(folder, 0.5)
    with torch.inference_mode():
        model(torch.arange(2, 9)[None])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_what_fits_is_read_once(make_model: Any, load: Any) -> None:
    """A model that fits its memory reads nothing after the load; one that does not reads the same bytes each pass."""
    whole, part = load(make_model("qwen2"), 1.0), load(make_model("llama"), 0.6)
    ids = torch.arange(2, 9)[None]
    with torch.inference_mode():
        before = whole.pagein._reader.stats.bytes
        whole.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert whole.pagein._reader.stats.bytes == before
        part.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    sizes = {one.nbytes for one in part.pagein.report.passes}
    assert len(sizes) == 1
    assert sizes.pop() >= part.pagein.plan.streamed_bytes_per_pass > 0


def test_plans_after_some_passes_go_by_how_those_computed(make_model: Any, load: Any) -> None:
    """The first plan knows what a product takes; once tokens were made, a plan knows what they computed for."""
    model = load(make_model("llama"), 0.7)
    estimated = model.pagein.plan.compute_seconds
    assert estimated is not None
    with torch.inference_mode():
        model.generate(torch.arange(2, 9)[None], max_new_tokens=8, eos_token_id=None, do_sample=False, pad_token_id=0)
    measured = model.pagein.report.compute_seconds
    alone = [one.seconds - one.waited for one in model.pagein.report.passes if one.tokens == 1]
    assert measured is not None
    assert min(alone) <= measured <= max(alone)
    plan = model.pagein.set_memory(str(model.pagein.plan.memory))
    assert plan.compute_seconds == measured
    assert plan.predicted_seconds is not None
    assert plan.predicted_seconds >= 0.999 * measured


def test_prefetch_is_a_number_of_buffers_or_left_to_the_plan(make_model: Any, load: Any) -> None:
    """A number is taken where so many fit; "auto" takes a number that is predicted to be no slower than any."""
    folder = make_model("llama")
    chosen = load(folder, 0.6).pagein.plan
    for depth in (2, 3, 4):
        plan = load(folder, 0.6, prefetch=depth).pagein.plan
        assert plan.slots >= depth
    assert 2 <= chosen.slots <= 4
