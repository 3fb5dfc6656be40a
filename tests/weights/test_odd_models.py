"""Models that are built, stored or used in odd ways, which a review found computed otherwise than a full load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.weights.test_review import GREEDY, IDS, compare, config_of, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_gradients")]


@pytest.fixture
def no_gradients() -> Any:
    with torch.no_grad():
        yield


CASES: dict[str, Callable[[], tuple[Any, str]]] = {
    "parameters made past the default device": lambda: (config_of("DiffLlamaConfig"), "DiffLlamaForCausalLM"),
    "a head that does more than multiply": lambda: (config_of("DoryConfig"), "DoryForCausalLM"),
    "a head whose bias hangs elsewhere too": lambda: (config_of("BertConfig"), "BertForMaskedLM"),
    "positions as many as words": lambda: (
        transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=512, n_positions=512),
        "GPT2LMHeadModel",
    ),
    "ids that are brought to the table": lambda: (
        config_of("Llama4TextConfig", head_dim=16, num_local_experts=2, intermediate_size_mlp=96),
        "Llama4ForCausalLM",
    ),
    "blocks of two classes": lambda: (
        config_of("JambaConfig", num_hidden_layers=8, num_experts=4, use_mamba_kernels=False, mamba_d_state=8),
        "JambaForCausalLM",
    ),
    "tensors that several blocks share": lambda: (
        config_of(
            "ZambaConfig", num_hidden_layers=8, attn_layer_period=3, attn_layer_offset=2, n_mamba_heads=2,
            use_mamba_kernels=False, mamba_d_state=8,
        ),
        "ZambaForCausalLM",
    ),
    "feed-forwards of several widths, layers that share a cache": lambda: (
        config_of(
            "Gemma3nTextConfig", intermediate_size=[128, 128, 256, 256] * 2, num_hidden_layers=8, head_dim=16,
            vocab_size_per_layer_input=512, hidden_size_per_layer_input=16, laurel_rank=8, num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 4, activation_sparsity_pattern=[0.0] * 8,
            sliding_window=16,
        ),
        "Gemma3nForCausalLM",
    ),
    "a buffer that is kept in fp32": lambda: (
        config_of(
            "DeepseekV3Config", moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
            topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
            first_k_dense_replace=1,
        ),
        "DeepseekV3ForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_models_of_odd_build_equal_a_full_load(tmp_path: Path, load: Any, case: str) -> None:
    """Whatever a class does otherwise, its bits are those of a full load, resident and streamed."""
    full = save(tmp_path, *CASES[case]())
    model = load(tmp_path)
    ours, theirs = dict(model.named_buffers()), dict(full.named_buffers())
    assert {name: one.dtype for name, one in ours.items()} == {name: one.dtype for name, one in theirs.items()}
    compare(full, model)


def add_tensor(folder: Path, name: str, make: Callable[[dict[str, Any]], Any]) -> None:
    """Store one more tensor in a folder's only file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: make(tensors)}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("differ", [False, True])
def test_tied_tensors_that_are_stored_twice(tmp_path: Path, load: Any, caplog: Any, differ: bool) -> None:
    """Equal ones are one tensor; different ones are parted, as transformers parts them."""
    config = config_of("LlamaConfig", tie_word_embeddings=True)
    transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    add_tensor(tmp_path, "lm_head.weight", lambda tensors: tensors["model.embed_tokens.weight"] + int(differ))
    full = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    model = load(tmp_path)
    assert model.pagein.plan.needs.tied is not differ
    assert ("not tied" in caplog.text) is differ
    compare(full, model)


def test_tables_that_are_tied_are_in_memory_once(tmp_path: Path, load: Any) -> None:
    """As in FLAN-T5: a head of its own, and one table of encoder and decoder, counted and held once."""
    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, vocab_size=512)
    transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    add_tensor(tmp_path, "lm_head.weight", lambda tensors: tensors["shared.weight"] + 1)
    full = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype="auto").eval()
    model = load(tmp_path)
    assert model.pagein.plan.needs.embedding == 512 * 64 * 2
    places = {module.weight.data_ptr() for _, module in model.pagein._placement.structure.embeddings}
    assert len(places) == 1
    compare(full, model, input_ids=IDS, decoder_input_ids=IDS[:, :4])


def test_generate_without_ids_or_cache_equals_a_full_load(make_model: Any, load: Any) -> None:
    """What transformers cannot cut into pieces of a prompt goes in whole: embeddings, and no cache."""
    folder = make_model("llama")
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model = load(folder, 0.5)
    embeddings = full.get_input_embeddings()(IDS)
    for given in ({"inputs_embeds": embeddings}, {"input_ids": IDS, "use_cache": False}):
        assert torch.equal(model.generate(**given, **GREEDY), full.generate(**given, **GREEDY))


def test_pictures_longer_than_a_chunk_go_in_whole(tmp_path: Path, load: Any) -> None:
    """A prompt with a picture generates although it is longer than a piece of a prompt."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=8
    )
    text = config_of("LlamaConfig", num_key_value_heads=2)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=7)
    full = save(tmp_path, config, "LlavaForConditionalGeneration")
    ids = torch.arange(10, 50).reshape(1, 40)
    ids[0, 3:19] = 7
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    model = load(tmp_path, chunk=16)
    assert torch.equal(model.generate(**given, **GREEDY), full.generate(**given, **GREEDY))
    compare(full, model, **given)


@pytest.mark.parametrize("kind", ["Roberta", "RecurrentGemma"])
def test_models_that_give_no_cache_back_generate(tmp_path: Path, load: Any, kind: str) -> None:
    """An encoder used to generate, and a model that keeps its cache to itself, write what a full load writes."""
    more = {"attention_window_size": 16, "lru_width": 64} if kind == "RecurrentGemma" else {}
    full = save(tmp_path, config_of(f"{kind}Config", **more), f"{kind}ForCausalLM")
    model = load(tmp_path)
    assert torch.equal(model.generate(IDS, **GREEDY), full.generate(IDS, **GREEDY))
