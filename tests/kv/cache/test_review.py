"""What a review found: states that look right and are not, and threads that meet between a check and its act."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import StoppingCriteria, StoppingCriteriaList

from pagein.errors import KvBusy
from tests.kv.cache.tiers import Plain, check_whole, make, pool_of, turn, words, write

pytestmark = pytest.mark.torch


class _Stop(Exception):
    """The caller has gone away."""


class _After(StoppingCriteria):
    """Calls something after so many tokens of an answer."""

    def __init__(self, tokens: int, act) -> None:
        self._left, self._act = tokens, act

    def __call__(self, input_ids, scores, **kwargs):
        self._left -= 1
        if self._left == 0:
            self._act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _raise() -> None:
    raise _Stop


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next", "gemma3", "llama"])
def test_a_cancelled_answer_leaves_no_state_that_stands_for_more(kind: str, tmp_path: Path):
    """Recurrent state went on with a cancelled answer: the next turn must not go on from the prompt with it."""
    model = make(kind)
    pool = pool_of(model, 40, tmp_path)
    prompt = words(90)
    cache = pool.open("c")
    with pytest.raises(_Stop), cache.turn(prompt):
        write(model, cache, prompt, 20, stopping_criteria=StoppingCriteriaList([_After(5, _raise)]))
    longer = [*prompt, *words(7, seed=1)]
    out, _ = turn(pool, model, "c", longer)
    assert out == Plain(model).turn("c", longer)
    check_whole(pool)
    pool.close()


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next"])
def test_a_pass_that_breaks_off_after_a_recurrent_layer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first layer has taken the tokens when the blocks for the next one lack: the turn is not as it was."""
    model = make(kind)
    pool = pool_of(model, 40, tmp_path)
    prompt = words(90)
    said, _ = turn(pool, model, "c", prompt)
    cache = pool.open("c")
    longer = [*said, *words(7, seed=1)]
    with monkeypatch.context() as patch:
        patch.setattr(cache.batch, "advance", lambda *_: _raise())
        with pytest.raises(_Stop), cache.turn(longer):
            write(model, cache, longer)
    out, _ = turn(pool, model, "c", longer)
    assert out == Plain(model).turn("c", longer)
    pool.close()


@pytest.mark.parametrize("way", ["end", "abandon"])
def test_a_turn_that_ends_while_it_is_parked(way: str, tmp_path: Path):
    """Its blocks lie below under names that are dropped with it: the next turn must not count on them."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    prompt = words(150)
    cache = pool.open("c")
    cache.begin(prompt)
    out = write(model, cache, prompt)
    pool.park(cache)
    if way == "end":
        cache.end(out)
    else:
        cache.abandon()
    assert (cache.batch.length, cache.tokens) == (0, [])
    check_whole(pool)
    longer = [*out, *words(7, seed=1)]
    again, _ = turn(pool, model, "c", longer)
    assert again == Plain(model).turn("c", longer)
    check_whole(pool)
    pool.close()


def test_no_pass_over_a_parked_turn(tmp_path: Path):
    """What is parked has no blocks: a pass would write into those of others."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    prompt = words(150)
    cache = pool.open("c")
    cache.begin(prompt)
    out = write(model, cache, prompt)
    pool.park(cache)
    with pytest.raises(KvBusy):
        write(model, cache, out)
    pool.resume(cache)
    cache.end(write(model, cache, out))
    pool.close()


def test_a_long_one_loses_its_end_twice(tmp_path: Path):
    """Room is made of what is left of a conversation, not of what it once had: else nobody gets out of the loop."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    turn(pool, model, "long", words(38 * 64 - 10))
    for seed, name in enumerate("abc"):
        cache = pool.open(name)
        done = threading.Event()

        def go(cache=cache, seed=seed, done=done) -> None:
            cache.begin(words(8 * 64 - 20, seed=seed + 5))
            write(model, cache, words(8 * 64 - 20, seed=seed + 5), 2)
            done.set()

        threading.Thread(target=go, daemon=True).start()
        assert done.wait(30), f"no room for {name}"
    pool.close()


@pytest.mark.parametrize("order", ["close, forget", "forget, close", "forget"])
def test_a_forgotten_conversation_leaves_nothing_behind(order: str, tmp_path: Path):
    """What is on its way to the disk when a conversation is forgotten is not found there later."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    said, _ = turn(pool, model, "c", words(100))
    cache = pool.open("c")
    for act in order.split(", "):
        cache.close() if act == "close" else pool.forget("c")
    pool.flush()
    pool.close()
    again = pool_of(model, 40, tmp_path)
    assert turn(again, model, "other", [*said, 1, 2])[1].tokens == 0
    again.close()


def test_a_pool_made_in_inference_mode_serves_outside_of_it(tmp_path: Path):
    """`generate` computes without gradients, not in inference mode, and the mover in a thread of its own."""
    model = make()
    with torch.inference_mode():
        pool = pool_of(model, 5, tmp_path)
    for name in "abab":
        prompt = words(200, seed=ord(name))
        cache = pool.open(name)
        with cache.turn(prompt) as one:
            one.end(model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=3, do_sample=False))
    pool.close()
