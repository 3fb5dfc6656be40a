"""Faults that a review of the streamed weights found: each test failed before its fix."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagein.errors import BadUsage, ContextTooLong, ModelUnsuited, WeightsAway, WeightsUnreadable

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

    monkeypatch.setattr("pagein.weights.streaming.placement.Resident.__init__", fail)
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


def test_passes_in_and_out_of_inference_mode(make_model: Any, load: Any) -> None:
    """A unit that is cast while it streams computes outside of inference mode too, after it was met inside."""
    model = load(make_model("llama"), 0.5, dtype="float32")
    with torch.inference_mode():
        want = model(IDS).logits
    assert torch.equal(model(IDS).logits, want)


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
    from pagein.weights.reading.checkpoint import StoredTensor
    from pagein.weights.reading.layout import lay_out

    file = Path("model.safetensors")
    layout = lay_out([StoredTensor("empty", file, 4096, 0, "BF16", (0, 4))])
    assert (layout.extents, layout.places) == ((), {"empty": 0})


def swap(file: Path, change: Callable[[bytearray], None]) -> None:
    """Put another file of the same length in the place of one, as a finished download does."""
    data = bytearray(file.read_bytes())
    change(data)
    fresh = file.with_name("fresh")
    fresh.write_bytes(data)
    fresh.rename(file)


def test_a_file_that_was_replaced_is_refused(tmp_path: Path, load: Any) -> None:
    """Rows of the embedding never come from another file than the one whose header was read."""
    save(tmp_path, config_of("LlamaConfig"), "LlamaForCausalLM")
    model = load(tmp_path)
    table = model.pagein._placement.sources["model.embed_tokens.weight"].whole.file
    swap(table, lambda data: None)
    with pytest.raises(WeightsUnreadable, match="changed"):
        tighten_once(model)
    with pytest.raises(WeightsAway):
        model(IDS)


def tighten_once(model: Any) -> None:
    needs = model.pagein.plan.needs
    model.pagein.set_memory(needs.fixed + (needs.whole - needs.fixed) * 3 // 4)


def test_rows_of_a_file_that_is_written_to_are_refused(tmp_path: Path, load: Any) -> None:
    """A table whose file is written to while it is in use raises; its rows may be of both."""
    save(tmp_path, config_of("LlamaConfig"), "LlamaForCausalLM")
    model = load(tmp_path)
    tighten_once(model)
    table = model.pagein._placement.sources["model.embed_tokens.weight"].whole
    with table.file.open("r+b") as file:
        file.seek(table.offset)
        file.write(bytes(table.nbytes))
    with pytest.raises(WeightsUnreadable, match="changed"):
        model.get_input_embeddings()(IDS)


def test_a_file_that_came_after_its_header_was_read_is_refused(tmp_path: Path, load: Any, monkeypatch: Any) -> None:
    """Between the headers and the first read a shard may be replaced: then nothing is loaded."""
    save(tmp_path, config_of("LlamaConfig"), "LlamaForCausalLM")

    def sources(model: Any, checkpoint: Any) -> Any:
        swap(checkpoint.files[0], lambda data: None)
        return find_sources(model, checkpoint)

    from pagein.weights.reading.sources import find_sources

    monkeypatch.setattr("pagein.weights.auto.find_sources", sources)
    with pytest.raises(WeightsUnreadable, match="replaced"):
        load(tmp_path)


def test_a_forgotten_model_gives_its_files_back(make_model: Any) -> None:
    """A model that nobody closed leaves no open file and no thread behind once it is collected."""
    from pagein import AutoModel
    from tests.weights.conftest import SPEED

    def files() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    model = AutoModel.from_pretrained(make_model("llama"), memory=1 << 40, context=64, speed=SPEED, verbose=False)
    tighten(model)
    assert files() > before
    del model
    assert files() == before


@pytest.mark.parametrize("name", ["context", "batch", "chunk"])
def test_a_plan_for_nothing_is_refused(make_model: Any, name: str) -> None:
    """No tokens or no sequences would be a plan whose every call is refused."""
    from pagein import AutoModel

    with pytest.raises(BadUsage, match=f"{name} is 0"):
        AutoModel.from_pretrained(make_model("llama"), memory=1 << 40, **{name: 0})
