"""Of a mixture of experts only those are read that tokens are sent to, and nothing of the result changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from .conftest import SMALL, SPEED

pytestmark = pytest.mark.torch

SIZES = {**SMALL, "num_hidden_layers": 3}
KINDS = ["qwen3-moe", "mixtral", "qwen2-moe-shared", "deepseek-shared", "gpt-oss-fused", "granite-fused"]
IMPLEMENTATIONS = ["grouped_mm", "eager", "batched_mm"]
IDS = torch.arange(2, 40).view(2, 19)
WAY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def config_of(kind: str) -> Any:
    t = transformers
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if kind == "qwen3-moe":
        return t.Qwen3MoeConfig(**SIZES, **experts, num_experts=8)
    if kind == "mixtral":
        return t.MixtralConfig(**SIZES, num_local_experts=4)
    if kind == "qwen2-moe-shared":
        return t.Qwen2MoeConfig(**SIZES, **experts, num_experts=8, shared_expert_intermediate_size=32)
    if kind == "deepseek-shared":
        latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
        groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        return t.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **experts, **latent, **groups)
    if kind == "gpt-oss-fused":
        return t.GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, head_dim=16)
    if kind == "granite-fused":
        return t.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    assert kind == "jetmoe"
    heads = {"hidden_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2, "kv_channels": 16, "vocab_size": 512}
    return t.JetMoeConfig(**heads, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str, str], Path] = {}

    def make(kind: str, dtype: str = "bfloat16", shards: str = "1GB") -> Path:
        key = (kind, dtype, shards)
        if key not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp("experts")
            model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
            model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shards)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def load() -> Any:
    """Return a function that loads a folder with everything but some of its experts in memory."""
    opened: list[Any] = []

    def open_model(folder: Path, cached: float = 0.0) -> Any:
        from pagein import AutoModel

        model = AutoModel.from_pretrained(folder, 1 << 40, context=64, batch=4, chunk=64, speed=SPEED, verbose=False)
        opened.append(model.pagein)
        needs = model.pagein.plan.needs
        if needs.experts is not None:
            away = int((needs.experts.total - needs.experts.least) * (1 - cached))
            table = needs.embedding if away else 0  # it is gathered as long as anything is read
            model.pagein.set_memory(needs.whole - away - table)
        return model

    yield open_model
    for streamed in opened:
        streamed.close()


def full_load(folder: Path, implementation: str | None = None) -> Any:
    named = {} if implementation is None else {"experts_implementation": implementation}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **named).eval()


def experts_of(model: Any) -> Any:
    return model.pagein._placement.experts


@torch.inference_mode()
def assert_equal(model: Any, full: Any) -> None:
    assert torch.equal(model(IDS).logits, full(IDS).logits)
    assert torch.equal(model.generate(IDS, **WAY), full.generate(IDS, **WAY))


def routed_to(full: Any, ids: Any) -> list[tuple[int, int]]:
    """Every distinct expert of every block that a pass of a full load computes with."""
    hit: set[tuple[int, int]] = set()
    modules = [module for name, module in full.named_modules() if name.endswith(".experts")]

    def note(block: int) -> Any:
        return lambda module, inputs: hit.update((block, int(expert)) for expert in inputs[1].flatten())

    hooks = [module.register_forward_pre_hook(note(block)) for block, module in enumerate(modules)]
    with torch.inference_mode():
        full(ids)
    for hook in hooks:
        hook.remove()
    return sorted(hit)


def read_for(model: Any, ids: Any) -> int:
    """Bytes that the reader reads for one pass, less those of streamed blocks."""
    streamed = model.pagein
    assert streamed._placement.stream is None, "only experts are read in this test"
    before = streamed._reader.stats.bytes
    with torch.inference_mode():
        model(ids)
    return int(streamed._reader.stats.bytes - before)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_a_full_load(folder_of: Any, load: Any, kind: str) -> None:
    """With the least cache the bits are those of transformers' own load and its own choice of implementation."""
    model = load(folder_of(kind))
    assert all(pool.slots == pool.least for pool in experts_of(model).pools)
    assert_equal(model, full_load(folder_of(kind)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_implementation_and_dtype_keeps_its_bits(
    folder_of: Any, load: Any, implementation: str, dtype: str
) -> None:
    """The implementation of experts that was chosen in transformers is the one that computes."""
    model = load(folder_of("mixtral", dtype))
    model.set_experts_implementation(implementation)
    assert_equal(model, full_load(folder_of("mixtral", dtype), implementation))


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss-fused"])
def test_experts_over_many_shards_give_the_same(folder_of: Any, load: Any, kind: str) -> None:
    """An expert whose matrices lie in several files, or apart from each other, is put together."""
    folder = folder_of(kind, shards="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_equal(load(folder), full_load(folder))


def test_another_dtype_than_stored_is_cast(folder_of: Any, load: Any) -> None:
    """Experts that are stored in fp32 and computed in bf16 are those that transformers casts."""
    from pagein import AutoModel

    folder = folder_of("mixtral", "float32")
    model = AutoModel.from_pretrained(folder, 1 << 40, dtype="bfloat16", context=64, speed=SPEED, verbose=False)
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, full(IDS).logits)
    model.pagein.close()


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss-fused"])
def test_a_token_reads_its_experts_and_no_more(folder_of: Any, load: Any, kind: str) -> None:
    """The reader reads the pages of the experts that a token is routed to, each once, and nothing else."""
    folder = folder_of(kind)
    model, token = load(folder), IDS[:1, :1]
    routed = routed_to(full_load(folder), token)
    pools = experts_of(model).pools
    pages = sum(pool.shares[block][expert].read_bytes for pool in pools for block, expert in routed)
    exact = sum(pool.shape.numel() * pool.dtype.itemsize for pool in pools) * len(routed)
    assert len(routed) == 3 * 2, "three blocks, two experts each"
    assert read_for(model, token) == pages
    assert pages <= exact + len(routed) * len(pools) * 2 * 4096, "pages around each matrix are all that is too much"
    assert pages <= model.pagein.plan.needs.experts.per_token


def test_a_prompt_reads_every_matrix_once_whatever_the_cache(folder_of: Any, load: Any) -> None:
    """Where a prompt needs more experts than there is room for, they pass through; none is read twice in a pass."""
    folder = folder_of("qwen3-moe")
    model = load(folder)
    routed = routed_to(full_load(folder), IDS)
    pools = experts_of(model).pools
    assert len(routed) > sum(pool.slots for pool in pools)
    pages = sum(pool.shares[block][expert].read_bytes for pool in pools for block, expert in routed)
    assert read_for(model, IDS) == pages


def test_what_is_cached_is_counted_and_not_read_again(folder_of: Any, load: Any) -> None:
    """With room for all of a token's experts the second pass over it reads nothing, and every use is a hit."""
    model, token = load(folder_of("qwen3-moe"), cached=0.6), IDS[:1, :1]
    first = read_for(model, token)
    cold = experts_of(model).counts
    assert (cold.hits, cold.nbytes) == (0, first)
    assert read_for(model, token) == 0
    warm = experts_of(model).counts
    assert warm.hits == warm.uses - cold.uses == cold.uses
    last = model.pagein.report.passes[-1]
    assert (last.routed, last.hits, last.uses) == (0, cold.uses, cold.uses)


def test_reads_stop_when_all_experts_fit(folder_of: Any, load: Any) -> None:
    """With memory for the whole model experts are read while it is loaded, and never after."""
    model = load(folder_of("mixtral"), cached=1.0)
    assert model.pagein.plan.fits_whole
    assert read_for(model, IDS) == 0
    assert experts_of(model).counts.hits == experts_of(model).counts.uses > 0


def test_a_cache_smaller_than_a_token_still_hits(folder_of: Any, load: Any) -> None:
    """Blocks come round in a cycle, so that plain LRU would hit nothing; each block keeps a share of the slots."""
    model, token = load(folder_of("qwen3-moe"), cached=0.1), IDS[:1, :1]
    assert all(2 < pool.slots < 6 for pool in experts_of(model).pools), "a token uses two experts of three blocks"
    for _ in range(3):
        read_for(model, token)
    assert experts_of(model).counts.hits > 0


def test_the_budget_holds_the_cache(folder_of: Any, load: Any) -> None:
    """The slots and the landing buffers together take no more than the plan gives to experts."""
    for kind in ("qwen3-moe", "mixtral"):
        for cached in (0.0, 0.37, 0.9, 1.0):
            model = load(folder_of(kind), cached)
            pools = experts_of(model).pools
            taken = sum(pool.slots * pool.slot_bytes + pool.fixed_bytes for pool in pools)
            assert taken <= model.pagein.plan.expert_cache
            assert taken == sum(pool._flat.nbytes + pool._stage_flat.nbytes for pool in pools)


def test_streamed_blocks_and_routed_experts_together(folder_of: Any, load: Any) -> None:
    """The rest of the blocks passes through the ring while experts are read beside it; the report counts both."""
    folder = folder_of("qwen3-moe")
    model = load(folder)
    needs = model.pagein.plan.needs
    slots = 2 * max(unit.slot_bytes for unit in needs.units)
    model.pagein.set_memory(needs.fixed + needs.head + slots + needs.experts.least)
    assert len(model.pagein.plan.resident) < len(needs.units)
    assert_equal(model, full_load(folder))
    last = model.pagein.report.passes[-1]
    assert 0 < last.routed < last.nbytes
    assert "experts: " in model.pagein.report.lines()[-1]


def test_prompts_in_step_share_the_cache(folder_of: Any, load: Any) -> None:
    """Several generations through one set of experts give what each gives alone."""
    model = load(folder_of("qwen3-moe"), cached=0.3)
    prompts = [torch.arange(2, 2 + size)[None] for size in (3, 9, 17)]

    def job(prompt: Any) -> Any:
        return lambda: model.generate(prompt, **WAY)

    with torch.inference_mode():
        alone = [job(prompt)() for prompt in prompts]
        together = model.pagein.lockstep.run([job(prompt) for prompt in prompts])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_experts_that_are_modules_are_read_when_called(tmp_path: Path, load: Any) -> None:
    """Experts in a list of modules get their tensors one by one, with the bits of a full load."""
    from pagein import AutoModel

    layers = {"num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 512, "num_experts": 4}
    config = transformers.SwitchTransformersConfig(**layers, **sizes, expert_capacity=64, decoder_start_token_id=0)
    torch.manual_seed(0)
    transformers.SwitchTransformersForConditionalGeneration(config).save_pretrained(tmp_path)
    full = transformers.SwitchTransformersForConditionalGeneration.from_pretrained(tmp_path).eval()
    model = AutoModel.from_pretrained(tmp_path, 1 << 40, context=64, batch=4, speed=SPEED, verbose=False)
    needs = model.pagein.plan.needs
    model.pagein.set_memory(needs.whole - needs.experts.total + needs.experts.least)
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    with torch.inference_mode():
        assert torch.equal(model(**given).logits, full(**given).logits)
    assert experts_of(model).counts.nbytes > 0
    model.pagein.close()


def test_experts_that_cannot_be_divided_stay_with_their_block(folder_of: Any, load: Any) -> None:
    """A class that computes with all experts at once is read whole, says so, and is right."""
    model = load(folder_of("jetmoe"))
    assert model.pagein.plan.needs.experts is None
    assert "JetMoeParallelExperts" in model.pagein.notes[0]
    full = full_load(folder_of("jetmoe"))
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, full(IDS).logits)


def test_a_computation_with_all_experts_is_refused(folder_of: Any, load: Any) -> None:
    """What is not known to use one expert after another raises, instead of computing with what is not there."""
    from pagein.errors import ModelUnsuited

    model = load(folder_of("mixtral"))
    tensor = model.model.layers[0].mlp.experts.gate_up_proj
    with pytest.raises(ModelUnsuited, match="bmm"):
        torch.bmm(torch.zeros(4, 1, 128), tensor)


def test_a_file_that_changes_is_named(folder_of: Any, load: Any, tmp_path: Path) -> None:
    """A file that became shorter under way raises WeightsUnreadable with its path, again and again."""
    import shutil

    from pagein.errors import WeightsUnreadable

    folder = tmp_path / "model"
    shutil.copytree(folder_of("qwen3-moe"), folder)
    model = load(folder)
    with torch.inference_mode():
        model(IDS)
        with (folder / "model.safetensors").open("r+b") as opened:
            opened.truncate(4096)
        for _ in range(2):
            with pytest.raises(WeightsUnreadable, match=r"model\.safetensors"):
                model(IDS)


def test_experts_go_before_what_is_read_ahead(tmp_path: Path) -> None:
    """The computation waits for experts and not for the next block, so that they overtake it, in their own order."""
    from pagein.memory.buffers import Buffer
    from pagein.weights.reading.files import ReadMode
    from pagein.weights.reading.reader import Extent, Reader

    file = tmp_path / "bytes"
    file.write_bytes(bytes(4096))
    with Reader(ReadMode.BUFFERED, threads=1) as reader:
        reader._queue.stop()
        for thread in reader._threads:
            thread.join()
        order = [reader.read([Extent(file, 0, 4096, 0)], Buffer(4096), urgent=urgent) for urgent in (False, True, True)]
        assert list(reader._queue.readings) == [order[1], order[2], order[0]]
