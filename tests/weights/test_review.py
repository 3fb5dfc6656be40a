"""Faults that a review of the streamed weights found: each test failed before its fix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagein.errors import ContextTooLong, ModelUnsuited, WeightsAway, WeightsUnreadable

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

IDS = torch.arange(5, 14).reshape(1, 9)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def save(folder: Path, config: Any, kind: str, dtype: Any = torch.bfloat16) -> Any:
    """Write a model with weights that no initialisation would give, and return it loaded in full."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)._from_config(config, dtype=dtype)
    for tensor in [*model.parameters(), *(one for name, one in model.named_buffers() if name in model.state_dict())]:
        tensor.add_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(folder, max_shard_size="300KB")
    return getattr(transformers, kind).from_pretrained(folder, dtype="auto").eval()


def config_of(kind: str, **more: Any) -> Any:
    given = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 256,
    }  # fmt: skip
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return getattr(transformers, kind)(**{**given, **more})


def tighten(model: Any) -> Any:
    """Go from all resident to the least plan there is."""
    needs = model.pagein.plan.needs
    for step in range(1, 40):
        try:
            model.pagein.set_memory(needs.fixed + (needs.whole - needs.fixed) * step // 40)
        except Exception:  # does not fit yet
            continue
        break
    assert not model.pagein.plan.fits_whole
    return model


def compare(full: Any, model: Any, **given: Any) -> None:
    given = given or {"input_ids": IDS}
    want = full(**given).logits
    assert torch.equal(model(**given).logits, want)
    tighten(model)
    for _ in range(2):
        assert torch.equal(model(**given).logits, want)


def interrupt(module: Any) -> Any:
    """Let Ctrl-C come the next time that a module computes."""

    def strike(*_: Any) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(strike)
    return handle


def streamed_block(model: Any) -> Any:
    resident = model.pagein.plan.resident
    return next(layer for index, layer in enumerate(model.model.layers) if index not in resident)


def test_an_interrupted_block_leaves_the_model_whole(make_model: Any, load: Any) -> None:
    """After Ctrl-C amid a block the next pass computes as ever (the hook that closes a unit had been passed by)."""
    model = load(make_model("llama"), 0.5)
    want = model(IDS).logits
    interrupt(streamed_block(model).mlp)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    assert torch.equal(model(IDS).logits, want)
    assert len(model.pagein.report.passes) == 2


def test_an_interrupted_model_can_be_planned_anew_and_closed(make_model: Any, load: Any) -> None:
    """After Ctrl-C amid a block nothing looks into the buffers of a ring that is gone."""
    model = load(make_model("llama"), 0.5)
    want, block = model(IDS).logits, streamed_block(model)
    interrupt(block.mlp)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    model.pagein.set_memory(1 << 40)
    assert torch.equal(model(IDS).logits, want)
    model.pagein.close()
    assert all(parameter.is_meta for parameter in block.parameters())


def test_an_interrupted_wait_ends_the_reading_first(make_model: Any, load: Any, monkeypatch: Any) -> None:
    """Ctrl-C while a block is being read: nothing else is read into its buffer before that reading has ended."""
    model = load(make_model("llama"), 0.5)
    ring, reader, told = model.pagein._placement.stream.ring, model.pagein._reader, []
    cancel, read = reader.cancel, reader.read
    unit = ring.expected
    slot = next(slot for slot in ring.slots if slot.unit == unit)
    reading = slot.reading
    monkeypatch.setattr(type(reading), "wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(reader, "cancel", lambda one: (told.append(one), cancel(one)))
    monkeypatch.setattr(reader, "read", lambda extents, buffer: (told.append(buffer), read(extents, buffer))[1])
    with pytest.raises(KeyboardInterrupt):
        ring.acquire(unit)
    assert told.index(reading) < told.index(slot.buffer)


def test_an_interrupt_in_step_ends_everybody(make_model: Any, load: Any) -> None:
    """Ctrl-C in a batch stops all of its texts at once, and none of them goes on in the next call."""
    model = load(make_model("llama"), 0.5)
    want = model.pagein.generate_batch([IDS[0]], **GREEDY)
    passes: list[int] = []
    model.model.norm.register_forward_hook(lambda *_: passes.append(1))
    interrupt(streamed_block(model).mlp)
    with pytest.raises(KeyboardInterrupt):
        model.pagein.generate_batch([IDS[0], IDS[0, :5]], **GREEDY)
    assert passes == []
    assert model.pagein.lockstep.is_idle
    assert model.pagein.lockstep.taken_tokens == 0
    assert torch.equal(model.pagein.generate_batch([IDS[0]], **GREEDY)[0], want[0])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_closed_model_says_so(make_model: Any, load: Any, kind: str) -> None:
    """Nothing computes without weights: a closed model, whole or its body alone, raises by name (meta came out)."""
    model = load(make_model(kind), 1.0)
    model.pagein.close()
    for act in (lambda: model(IDS), lambda: model.base_model(IDS), lambda: model.pagein.set_memory(1 << 40)):
        with pytest.raises(WeightsAway):
            act()
    model.pagein.close()


def test_a_load_that_fails_leaves_a_model_that_says_so(make_model: Any, load: Any, monkeypatch: Any) -> None:
    """Where a new plan cannot be carried out nothing computes; once it can be, all is as before."""
    model = load(make_model("llama-tied"), 0.5)
    want = model(IDS).logits
    placement = model.pagein._placement

    def fail(*_: Any) -> None:
        raise WeightsUnreadable("model.safetensors", "the disk is gone")

    monkeypatch.setattr("pagein.weights.placement.Resident.__init__", fail)
    with pytest.raises(WeightsUnreadable):
        model.pagein.set_memory(1 << 40)
    assert placement.is_away
    for act in (lambda: model(IDS), lambda: model.model(IDS)):
        with pytest.raises(WeightsAway):
            act()
    monkeypatch.undo()
    model.pagein.set_memory(1 << 40)
    assert torch.equal(model(IDS).logits, want)


def test_threads_take_turns(make_model: Any, load: Any) -> None:
    """Two threads that call one streamed model get the bits of one that calls it alone."""
    model = load(make_model("llama"), 0.4)
    ids = [IDS, IDS + 100]
    want = [model(one).logits for one in ids]
    wrong: list[Any] = []

    def compute(which: int) -> None:
        try:
            with torch.no_grad():
                wrong.extend(which for _ in range(8) if not torch.equal(model(ids[which]).logits, want[which]))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=compute, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_body_in_another_thread_is_refused(make_model: Any, load: Any) -> None:
    """A block that one thread computes with is not taken from under it by another."""
    model = load(make_model("llama"), 0.4)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            model.model(IDS)
        except BaseException as error:
            caught.append(error)

    def meanwhile(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    want = model.model(IDS).last_hidden_state
    handle = streamed_block(model).mlp.register_forward_pre_hook(meanwhile)
    assert torch.equal(model.model(IDS).last_hidden_state, want)
    assert [type(error) for error in caught] == [WeightsAway]


def test_a_forked_process_is_refused(make_model: Any, load: Any, monkeypatch: Any) -> None:
    """In a forked process no thread reads: the model says so, it does not wait for ever."""
    model = load(make_model("llama"), 0.5)
    monkeypatch.setattr(model.pagein._reader, "_pid", -1)
    with pytest.raises(WeightsAway, match="process -1"):
        model(IDS)
    monkeypatch.undo()


def test_memory_cannot_change_amid_a_pass(make_model: Any, load: Any) -> None:
    """A participant that asks for another plan is refused; the ring is not pulled from under the others."""
    model = load(make_model("llama"), 0.5)
    model.model.layers[0].register_forward_pre_hook(lambda *_: model.pagein.set_memory(1 << 40) and None)
    with pytest.raises(WeightsAway):
        model.pagein.generate_batch([IDS[0]], **GREEDY)


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
    "a module that several blocks share": lambda: (
        config_of(
            "ZambaConfig", num_hidden_layers=8, attn_layer_period=3, attn_layer_offset=2, n_mamba_heads=2,
            use_mamba_kernels=False, mamba_d_state=8,
        ),
        "ZambaForCausalLM",
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


def test_passes_in_and_out_of_inference_mode(make_model: Any, load: Any) -> None:
    """A unit that is cast while it streams computes outside of inference mode too, after it was met inside."""
    model = load(make_model("llama"), 0.5, dtype="float32")
    with torch.inference_mode():
        want = model(IDS).logits
    assert torch.equal(model(IDS).logits, want)


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


def test_casts_of_the_whole_model_are_refused(make_model: Any, load: Any) -> None:
    """half(), float() and the like would change what is in memory and not what is to come."""
    model = load(make_model("llama"), 0.5)
    for act in (model.half, model.float, lambda: model.to(torch.float16)):
        with pytest.raises(ModelUnsuited):
            act()


def test_beams_take_their_room_in_a_batch(make_model: Any, load: Any) -> None:
    """Each beam is a sequence of its own in the cache."""
    model = load(make_model("llama"), 1.0, context=32, batch=1)
    with pytest.raises(ContextTooLong):
        model.pagein.generate_batch([IDS[0]], num_beams=3, **GREEDY)
    assert model.pagein.generate_batch([IDS[0]], num_beams=2, **GREEDY)[0].shape == (13,)


def test_a_longer_piece_of_a_prompt_counts(make_model: Any, load: Any) -> None:
    """The plan keeps activations for as many tokens as go in at once, not for a constant."""
    folder = make_model("llama")
    short, long = (load(folder, context=256, chunk=chunk).pagein.plan.needs for chunk in (16, 128))
    assert long.activations > 4 * short.activations


def test_an_empty_tensor_is_no_read() -> None:
    """A tensor without bytes has a place, and no extent of 0 bytes."""
    from pagein.weights.checkpoint import StoredTensor
    from pagein.weights.layout import lay_out

    file = Path("model.safetensors")
    layout = lay_out([StoredTensor("empty", file, 4096, 0, "BF16", (0, 4))])
    assert (layout.extents, layout.places) == ((), {"empty": 0})
