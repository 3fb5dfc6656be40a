"""Conversations that are larger than their device: exact, never refused while the tier below has room, and told."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
t = pytest.importorskip("transformers")

from transformers import DynamicCache

from pagein.errors import KvBusy, KvFull, KvLost
from pagein.kv.tiers.answers import Place, Source
from pagein.kv.tiers.spill import Spill
from pagein.kv.tiers.stretch import CHUNK, Stretch
from tests.kv.cache.models import model_of
from tests.kv.cache.tiers import _NEXT, ARGUMENT, SMALL, check_whole, pool_of, turn, words, write

pytestmark = pytest.mark.torch
KINDS = {
    "llama": lambda: t.LlamaConfig(**{**SMALL, "num_hidden_layers": 7}),
    "gemma3": lambda: t.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 10},
        head_dim=8,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 5,
    ),
    "qwen3-next": lambda: t.Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": 10}, **{**_NEXT, "layer_types": ["linear_attention", "full_attention"] * 5}
    ),
}
GENERATE = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@functools.cache
def deep(kind: str = "llama"):
    """A model of more layers than a device will hold, whose answers hang on its KV."""
    t.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    for one in model.parameters():
        if one.dim() >= 2:
            one.data.mul_(5)
    return model


def answer(model, cache, prompt: list[int], new: int = 12):
    """Return all tokens, and the logits of each new one."""
    ids = torch.tensor([prompt])
    given = {**GENERATE, ARGUMENT: cache, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        found = model.generate(ids, max_new_tokens=new, **given)
    return found.sequences[0].tolist(), torch.cat(found.logits)


def compare(model, pool, name: str, prompt: list[int], plain) -> tuple[list[int], object]:
    """Run a turn beside an unlimited stock cache: the same bits."""
    cache = pool.open(name)
    with cache.turn(prompt) as one:
        out, logits = answer(model, cache, prompt)
        want, bits = answer(model, plain, prompt)
        assert out == want
        assert torch.equal(logits, bits)
        stretch = cache.batch.stretch
        assert stretch is None or stretch.staged <= pool.device.memory // 2
        one.end(out)
    return out, one.reuse


@pytest.mark.parametrize("kind", list(KINDS))
def test_larger_than_the_device(kind: str, tmp_path: Path):
    """A conversation grows to several times its device's memory; logits are the same bits, also after a restart."""
    model, said = deep(kind), []
    plain, blocks = DynamicCache(config=model.config), 10 if kind == "gemma3" else 18
    pool = pool_of(model, blocks, tmp_path)
    for at in range(4):
        prompt = [*said, *words(450, seed=at)]
        said, reuse = compare(model, pool, "c", prompt, plain)
        assert reuse.tokens == max(len(prompt) - 451, 0)  # all that has KV: the last token of an answer has none yet
        check_whole(pool)
        if at == 2:
            assert pool.report().places == {Place.COLD: 1}
            pool.close()
            pool = pool_of(model, blocks, tmp_path)
    assert reuse.source is Source.DISK
    assert pool.geometry.kv_bytes(len(said)) > 1.5 * pool.device.memory
    report = pool.report()
    assert report.stretched >= 1
    assert report.moved["layers"] > 0
    assert (report.device.used, report.dropped_blocks, report.stretched_now) == (0, 0, 0)
    assert pool._below.cold.store._room.lent == 0
    pool.close()


def test_a_device_of_one_layer(tmp_path: Path):
    """Where there is room for one layer only, it is enough: nothing comes up ahead."""
    model, prompt = deep(), words(900)
    pool = pool_of(model, 1, tmp_path)
    pool.resize(2 * Stretch.least(pool._stretching._layers, 960))
    cache = pool.open("c")
    with cache.turn(prompt) as one:
        out, logits = answer(model, cache, prompt)
        assert len(cache.batch.stretch._slots) == 1
        assert pool.report().moved_per_token == cache.batch.stretch.moved_for(cache.batch.length)
        assert pool.report().moved_per_token > 0.99 * pool.geometry.kv_bytes(cache.batch.length - 64)
        assert any("larger than the device: 1" in line for line in pool.report().lines())
        one.end(out)
    want, bits = answer(model, DynamicCache(config=model.config), prompt)
    assert out == want
    assert torch.equal(logits, bits)
    check_whole(pool)
    pool.close()


def test_an_answer_outgrows_the_device(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A turn that began in blocks goes on in layers in the middle of its answer, and warns once of what that moves."""
    model, prompt = deep(), words(1100)
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("c")
    with caplog.at_level(logging.WARNING, "pagein.kv"), cache.turn(prompt) as one:
        out, logits = answer(model, cache, prompt, 90)
        assert cache.batch.stretch is not None
        one.end(out)
    want, bits = answer(model, DynamicCache(config=model.config), prompt, 90)
    assert out == want
    assert torch.equal(logits, bits)
    told = [record.message for record in caplog.records if "each further token moves" in record.message]
    assert len(told) == 1
    check_whole(pool)
    pool.close()


def test_an_edit_and_a_turn_called_off(tmp_path: Path):
    """Another ending of a long text reuses what both begin with; one that was called off leaves what it found."""
    model, first = deep(), words(1500)
    pool = pool_of(model, 18, tmp_path)
    said, _ = compare(model, pool, "c", first, DynamicCache(config=model.config))
    edited = [*said[:1300], *words(40, seed=3)]
    cache = pool.open("c")
    with cache.turn(edited) as one:
        assert one.reuse.tokens == 1300
        answer(model, cache, edited, 3)
    assert pool.device.used_bytes == 0
    cache = pool.open("c")
    with cache.turn(edited) as one:
        assert one.reuse.tokens >= 1300
        out, _ = answer(model, cache, edited)
        one.end(out)
    assert out == answer(model, DynamicCache(config=model.config), edited)[0]
    check_whole(pool)
    pool.close()


def test_taken_back(tmp_path: Path):
    """Guessed tokens are taken back, across pieces and layers that came up ahead."""
    model, text = deep(), words(1400)
    pool = pool_of(model, 18, tmp_path)
    cache, plain = pool.open("c"), DynamicCache(config=model.config)
    cache.begin(text)
    with torch.inference_mode():
        for one in (cache, plain):
            model(torch.tensor([text]), **{ARGUMENT: one})
        for back, seed in ((5, 1), (CHUNK + 30, 2), (1, 3)):
            for one in (cache, plain):
                one.crop(-back)
            more = torch.tensor([words(2, seed=seed)])
            ours, theirs = (model(more, **{ARGUMENT: one}).logits for one in (cache, plain))
            assert torch.equal(ours, theirs)
    cache.abandon()
    check_whole(pool)
    pool.close()


def test_parked_and_resumed(tmp_path: Path):
    """It waits below with nothing on the device, and goes on exactly; a pass meanwhile is refused."""
    for kind in ("llama", "gemma3"):
        model, prompt = deep(kind), words(1600)
        pool = pool_of(model, 18, tmp_path / kind)
        cache = pool.open("c")
        cache.begin(prompt)
        half, _ = answer(model, cache, prompt, 6)
        pool.park(cache)
        assert (pool.device.used_bytes, pool.report().places) == (0, {Place.PARKED: 1})
        with pytest.raises(KvBusy):
            answer(model, cache, half, 1)
        turn(pool, model, "other", words(500, seed=1))
        pool.resume(cache)
        out, logits = answer(model, cache, half, 6)
        cache.end(out)
        want, bits = answer(model, DynamicCache(config=model.config), prompt, 12)
        assert out == want
        assert torch.equal(logits, bits[6:])
        check_whole(pool)
        pool.close()


def test_others_go_on_beside_it(tmp_path: Path):
    """It takes half of the device at most: a second turn is admitted, and both are right."""
    model, prompt, short = deep(), words(1800), words(200, seed=1)
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("long")
    cache.begin(prompt)
    half, _ = answer(model, cache, prompt, 4)
    assert pool.could(300)
    other, _ = turn(pool, model, "short", short, 20)
    assert other == write(model, DynamicCache(config=model.config), short, 20)
    out, _ = answer(model, cache, half, 4)
    cache.end(out)
    assert out == answer(model, DynamicCache(config=model.config), prompt, 8)[0]
    check_whole(pool)
    pool.close()


def test_squeezed_below(tmp_path: Path):
    """With compression the layers of a turn are exact all the same: only what it leaves behind is squeezed."""
    model, prompt = deep(), words(1500)
    pool = pool_of(model, 18, tmp_path, settings={"compression": "int8"})
    said, _ = compare(model, pool, "c", prompt, DynamicCache(config=model.config))
    out, reuse = turn(pool, model, "c", [*said, 5, 6, 7])
    assert reuse.tokens == len(said) - 1
    assert len(out) == len(said) + 9
    check_whole(pool)
    pool.close()


def test_refused_with_both_numbers(tmp_path: Path):
    """Where not even a layer fits, where nothing is below, or the disk is full, both numbers are told."""
    model = deep()
    pool = pool_of(model, 18)
    with pytest.raises(KvFull) as full:
        pool.open("c").begin(words(1500))
    assert full.value.details["have_bytes"] == pool.device.memory
    pool.close()
    pool = pool_of(model, 1, tmp_path / "a")
    with pytest.raises(KvFull) as full:
        pool.open("c").begin(words(1500))
    assert full.value.details["need_bytes"] == Stretch.least(pool._stretching._layers, 1500)
    assert not pool.could_ever(1500)
    pool.close()
    pool = pool_of(model, 18, tmp_path / "b", disk_cap="1MiB")
    with pytest.raises(KvFull, match="in the tier below"):
        pool.open("c").begin(words(1500))
    assert pool._below.cold.store._room.lent == 0
    check_whole(pool)
    pool.close()


def test_within_the_cap_of_the_disk(tmp_path: Path):
    """What a turn has below counts in the folder's cap: older conversations leave for it, and come back never wrong."""
    model = deep()
    pool = pool_of(model, 18, tmp_path, disk_cap="5MiB")
    for at in range(4):
        turn(pool, model, f"old{at}", words(800, seed=at))
    pool.flush()
    before = pool.report().disk.used
    cache, prompt = pool.open("long"), words(1800, seed=9)
    cache.begin(prompt)
    out, _ = answer(model, cache, prompt, 2)
    store = pool._below.cold.store
    assert store._room.lent >= pool.geometry.kv_bytes(1800)
    assert store._room.used() <= store._room.cap
    assert pool.report().disk.used < before
    cache.end(out)
    assert out == answer(model, DynamicCache(config=model.config), prompt, 2)[0]
    assert store._room.lent == 0
    check_whole(pool)
    pool.close()


def test_nothing_is_left_of_it(tmp_path: Path):
    """The file has no name: nobody finds it, and the end of the process is the end of it."""
    model = deep()
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("c")
    cache.begin(words(1800))
    names = set(os.listdir(tmp_path))
    assert not [name for name in names if name.startswith("tmp")]
    spill = cache.batch.stretch._spill
    assert spill._file is not None
    assert os.fstat(spill._file.fileno()).st_nlink == 0
    cache.close()
    assert spill._file is None
    pool.close()


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What does not come up ends the pass with KvLost; begun again, the turn is right."""
    model, prompt = deep(), words(1500)
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("c")
    cache.begin(prompt)
    half, _ = answer(model, cache, prompt, 3)

    def fail(*_):
        raise KvLost("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Spill, "read", fail)
        with pytest.raises(KvLost, match="the disk is gone"):
            answer(model, cache, half, 3)
        patch.undo()
        cache.abandon()
    cache = pool.open("c")
    cache.begin(prompt)
    out, _ = answer(model, cache, prompt, 6)
    cache.end(out)
    assert out == answer(model, DynamicCache(config=model.config), prompt, 6)[0]
    check_whole(pool)
    pool.close()


def test_what_cannot_be_saved_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A disk that fails after the answer ends no turn: it is logged, all is free, and the next turn computes anew."""
    model, prompt = deep(), words(1500)
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("c")
    cache.begin(prompt)
    out, _ = answer(model, cache, prompt, 6)

    def fail(*_):
        raise KvLost("the disk is gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "pagein.kv"):
        patch.setattr(Spill, "read", fail)
        cache.end(out)
    assert "the disk is gone" in caplog.text
    report = pool.report()
    assert (report.device.used, report.stretched_now) == (0, 0)
    assert report.dropped_blocks > 0
    check_whole(pool)
    cache = pool.open("c")
    with cache.turn(prompt) as one:
        again, _ = answer(model, cache, prompt, 6)
        one.end(again)
    assert again == out
    check_whole(pool)
    pool.close()


def test_no_second_row(tmp_path: Path):
    """Beams of such a conversation, and forks of its cache, are refused: their rows would not fit."""
    model, prompt = deep(), words(1500)
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("c")
    cache.begin(prompt)
    with pytest.raises(KvFull, match="a second row"):
        write(model, cache, prompt, 3, num_beams=2)
    cache.abandon()
    check_whole(pool)
    pool.close()


def test_layers_that_share_kv_are_not_stretched(tmp_path: Path):
    """A layer that looks at another's KV would find it replaced: such a model is refused as it was."""
    model = model_of("gemma3n")
    pool = pool_of(model, 8, tmp_path)
    assert not pool.could_ever(5000)
    with pytest.raises(KvFull):
        pool.open("c").begin(words(5000))
    pool.close()
    pool = pool_of(deep(), 18, tmp_path / "other")
    assert pool.could_ever(3000)
    pool.close()
