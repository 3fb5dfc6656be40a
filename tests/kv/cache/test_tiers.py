"""Conversations over device and disk: every answer is that of an unlimited plain cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.kv.tiers.answers import Source, Why
from tests.kv.cache.tiers import ARGUMENT, Plain, check_whole, make, pool_of, turn, words, write

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_many_conversations(kind: str, tmp_path: Path):
    """64 conversations that need ten times the device's budget, in random order: each answer as without a limit."""
    model, plain, chance = make(kind), Plain(make(kind)), random.Random(5)
    pool = pool_of(model, 14, tmp_path / "kv")
    said: dict[str, list[int]] = {}
    order = [f"c{number}" for number in range(64)] * 2
    chance.shuffle(order)
    for at, name in enumerate(order):
        prompt = said.get(name, []) + words(chance.randrange(20, 110), seed=at)
        said[name] = plain.turn(name, prompt)
        out, reuse = turn(pool, model, name, prompt)
        assert out == said[name], (at, name, reuse)
        assert pool.report().device.used <= pool.device.memory
    total = sum(pool.geometry.kv_bytes(len(tokens)) for tokens in said.values())
    assert total > (10 if kind == "llama" else 5) * pool.device.memory
    report = pool.report()
    assert report.reused_tokens["disk"] > 0
    assert report.dropped_blocks == 0
    check_whole(pool)
    pool.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "qwen3-next"])
@pytest.mark.parametrize("new_process", [True, False])
def test_restore_is_used(kind: str, new_process: bool, tmp_path: Path):
    """Scenarios 1, 2, 13: after a restart only what is new is computed, and the logits are the same bits."""
    model, plain = make(kind), Plain(make(kind))
    pool = pool_of(model, 40, tmp_path)
    said = plain.turn("c", words(500))
    assert turn(pool, model, "c", words(500))[0] == said
    if new_process:
        pool.close()
        pool = pool_of(model, 40, tmp_path)
    prompt = [*said, *words(5, seed=1)]
    want = plain.turn("c", prompt, new=32)
    out, reuse = turn(pool, model, "c", prompt, new=32)
    assert out == want
    assert reuse.computed <= 5 + 1
    assert reuse.source is (Source.DISK if new_process else Source.LIVE)
    check_whole(pool)
    pool.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_same_bits_after_restore(kind: str, tmp_path: Path):
    """Scenario 2: 32 greedy steps after a restore have bit-identical logits; a recompute is near, same tokens."""
    model = make(kind)
    pool = pool_of(model, 40, tmp_path)
    text = words(300)
    cache = pool.open("c")
    with cache.turn(text) as one, torch.inference_mode():
        model(torch.tensor([text]), **{ARGUMENT: cache})
        one.end(text)
    live = _steps(model, cache.fork(), text[-1:])
    pool.close()
    pool = pool_of(model, 40, tmp_path)
    cache = pool.open("c")
    reuse = cache.begin([*text, 0])
    assert reuse.tokens == 300
    back = _steps(model, cache, text[-1:])
    assert torch.equal(live, back)
    fresh = pool.open("other", "someone else")
    fresh.begin(text)
    with torch.inference_mode():
        model(torch.tensor([text]), **{ARGUMENT: fresh})
    anew = _steps(model, fresh, text[-1:])
    assert torch.allclose(live, anew, atol=1e-4)
    assert torch.equal(live.argmax(-1), anew.argmax(-1))
    pool.close()


def _steps(model, cache, first: list[int], count: int = 32):
    logits, ids = [], torch.tensor([first])
    with torch.inference_mode():
        for _ in range(count):
            logits.append(model(ids, **{ARGUMENT: cache}).logits[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
    return torch.cat(logits)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_other_conversation(kind: str, tmp_path: Path):
    """Scenario 3: a prompt that differs at token 5 never gets the old answer, and reuses at most 5 tokens."""
    model = make(kind)
    pool = pool_of(model, 40, tmp_path)
    first = words(200)
    turn(pool, model, "c", first)
    other = [*first[:5], *words(150, seed=9)]
    out, reuse = turn(pool, model, "c", other)
    assert out == Plain(model).turn("x", other)
    assert reuse.tokens == (5 if kind == "llama" else reuse.tokens)
    assert reuse.tokens <= 5
    pool.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_exact_prompt_again(kind: str, tmp_path: Path):
    """A prompt that is wholly known still computes its last token, and answers the same."""
    model = make(kind)
    pool = pool_of(model, 40, tmp_path)
    text = words(128)
    want, _ = turn(pool, model, None, text)
    out, reuse = turn(pool, model, None, text)
    assert out == want
    assert reuse.tokens == 127
    assert reuse.source is Source.SHARED
    pool.close()


def test_edit_of_the_last_turn(tmp_path: Path):
    """Scenario 14: behind a window, an edited last turn is right, by an earlier state or computed anew."""
    model = make("gemma3")
    pool, plain = pool_of(model, 60, tmp_path), Plain(model)
    said = turn(pool, model, "c", words(250))[0]
    longer = turn(pool, model, "c", [*said, *words(200, seed=2)])[0]
    assert len(longer) > 450
    edited = [*said, *words(30, seed=3)]
    out, reuse = turn(pool, model, "c", edited)
    assert out == plain.turn("c", edited)
    assert reuse.tokens >= len(said) - 1
    pool.close()


def test_tenants_share_nothing(tmp_path: Path):
    """Scenario 19: the same prompt of another tenant reuses nothing, in memory, on disk, after a restart."""
    model, text = make(), words(200)
    pool = pool_of(model, 40, tmp_path)
    turn(pool, model, None, text, tenant="a")
    assert turn(pool, model, None, text, tenant="b")[1].tokens == 0
    assert turn(pool, model, None, text, tenant="a")[1].tokens == 199
    pool.close()
    pool = pool_of(model, 40, tmp_path)
    assert turn(pool, model, None, text, tenant="c")[1].tokens == 0
    assert turn(pool, model, None, text, tenant="b")[1].tokens == 199
    pool.close()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights", lambda: make(seed=1)),
        ("dtype", lambda: make().to(torch.bfloat16)),
        ("rope", lambda: _with_rope(make())),
        ("attention", lambda: _eager(make())),
    ],
)
def test_wrong_model_is_a_miss(field: str, change, tmp_path: Path):
    """Scenario 4: other weights, dtype, RoPE or attention find nothing, and the answer names what differs."""
    text = words(200)
    pool = pool_of(make(), 40, tmp_path)
    turn(pool, make(), "c", text)
    pool.close()
    other = change()
    pool = pool_of(other, 40, tmp_path)
    out, reuse = turn(pool, other, "c", text)
    assert (reuse.tokens, reuse.kind) == (0, Why.SETTINGS)
    assert field in reuse.reason
    assert out == Plain(other).turn("c", text)
    pool.close()


def _with_rope(model):
    rope = {**model.config.rope_parameters, "rope_theta": 1234.0}
    model.config.rope_parameters = rope
    return model


def _eager(model):
    model.set_attn_implementation("eager")
    return model


def test_beams_on_a_restored_prefix(tmp_path: Path):
    """Scenario 15: beams over a prefix from the disk are those over a fresh cache."""
    from transformers import DynamicCache

    model, text = make(), words(200)
    pool = pool_of(model, 60, tmp_path)
    turn(pool, model, "c", text)
    pool.close()
    pool = pool_of(model, 60, tmp_path)
    cache = pool.open("c")
    with cache.turn(text) as one:
        out = write(model, cache, text, 12, num_beams=4)
        one.end(out)
    assert one.reuse.source is Source.DISK
    assert out == write(model, DynamicCache(config=model.config), text, 12, num_beams=4)
    check_whole(pool)
    pool.close()


def test_why_no_more_is_reused(tmp_path: Path):
    """The label is set where the reason is made: nothing known, another ending, slower than computing, damaged."""
    model, text = make(), words(300)
    pool = pool_of(model, 40, tmp_path, settings={"worth": True})
    assert turn(pool, model, "c", text)[1].kind is Why.EMPTY
    other = turn(pool, model, "c", [*text[:100], *words(50, seed=1)])[1]
    assert (other.tokens, other.kind) == (100, Why.TOKENS)
    assert turn(pool, model, "c", words(50, seed=2))[1].kind is Why.TOKENS
    turn(pool, model, "d", text)
    again = turn(pool, model, "e", text)[1]
    assert (again.tokens, again.kind) == (299, None)
    pool.close()
    pool = pool_of(model, 40, tmp_path, settings={"worth": True})
    pool._books.pace.prefilled(10_000, 0.0001)
    pool._books.pace.restored(10_000, 1.0)
    slower = turn(pool, model, "f", text)[1]
    assert (slower.tokens, slower.kind) == (0, Why.SLOWER)
    pool.close()
    for file in tmp_path.glob("*.slots"):
        with file.open("r+b") as slots:
            slots.write(bytes(file.stat().st_size))
    pool = pool_of(model, 40, tmp_path)
    damaged = turn(pool, model, "g", text)[1]
    assert (damaged.tokens, damaged.kind) == (0, Why.DAMAGED)
    pool.close()


def test_two_requests_of_one_session(tmp_path: Path):
    """Scenario 16: a second turn of a running conversation is a fork; both answers are as if alone."""
    model = make()
    pool = pool_of(model, 60, tmp_path)
    said = turn(pool, model, "c", words(150))[0]
    one, two = [*said, *words(9, seed=4)], [*said, *words(70, seed=5)]
    first = pool.open("c")
    first.begin(one)
    second = pool.open("c")
    assert second is not first
    assert second.begin(two).tokens >= 128
    answers = [write(model, first, one), write(model, second, two)]
    second.end(answers[1])
    first.end(answers[0])
    assert answers == [Plain(model).turn(0, one), Plain(model).turn(1, two)]
    check_whole(pool)
    pool.close()


def test_memory_returns(tmp_path: Path):
    """Scenario 10: after 100 turns of as many conversations and their end, no block is held."""
    model = make()
    pool = pool_of(model, 12, tmp_path)
    for number in range(100):
        cache = pool.open(f"c{number % 30}")
        text = words(40 + number, seed=number)
        with cache.turn(text) as one:
            one.end(text) if number % 7 == 0 else _pass(model, cache, one, text)
        if number % 5 == 0:
            cache.close()
    check_whole(pool)
    for one in list(pool._books.conversations.values()):
        one.cache.close()
    pool.flush()
    assert pool.report().device.used == 0
    assert len(pool._books.known) == 0
    pool.close()


def _pass(model, cache, one, text: list[int]) -> None:
    with torch.inference_mode():
        model(torch.tensor([text[one.reuse.tokens :]]), **{ARGUMENT: cache})
    one.end(text)
