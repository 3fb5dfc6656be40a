"""Turns of one conversation in one cache: what is reused is right, or it is not reused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein import TieredCache as exported
from pagein.errors import BadUsage, CacheMismatch, KvFull
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.reading import read_geometry
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.answers import Source
from tests.kv.cache.models import assert_same, generate, model_of, prompt, stock, tiered

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]

CROPPED = ["llama", "gemma3"]


def take_turn(model: Any, cache: TieredCache, ids: Any, **options: Any) -> tuple[Any, Any]:
    """Take a turn; return what was reused and what came."""
    with cache.turn(ids) as turn:
        found = generate(model, ids, cache, **options)
        turn.end(found.sequences)
    return turn.reuse, found


def test_the_name_at_the_top() -> None:
    """`from pagein import TieredCache` is this class."""
    assert exported is TieredCache


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma3-short", "jamba", "qwen3-next", "deepseek"])
def test_the_next_turn_computes_what_is_new_and_equals_the_live_continuation(kind: str) -> None:
    """A conversation through begin and end has the bits of one that simply went on with the stock cache."""
    model = model_of(kind)
    live, cache = stock(model), tiered(model)
    ids = prompt(90)
    first = generate(model, ids, live)
    assert_same(take_turn(model, cache, ids)[1], first)
    assert cache.tokens == first.sequences[0, :-1].tolist()
    ids = torch.cat([first.sequences, prompt(20, seed=5)], dim=1)
    theirs = generate(model, ids, live)
    reuse, ours = take_turn(model, cache, ids)
    assert (reuse.tokens, reuse.source) == (101, Source.LIVE)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", CROPPED)
def test_the_very_same_prompt_again(kind: str) -> None:
    """Trap 2: all but the last token are reused, and the answer is the same; the stock cache feeds all of it again."""
    model, cache, ids = model_of(kind), tiered(model_of(kind)), prompt(130)
    fresh = generate(model, ids, stock(model))
    take_turn(model, cache, ids, new=1)
    reuse, again = take_turn(model, cache, ids)
    assert reuse.tokens == 129
    assert cache.get_seq_length() == 130 + 11
    assert again.sequences.tolist() == fresh.sequences.tolist()
    for ours, theirs in zip(again.logits, fresh.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("kind", [*CROPPED, "jamba"])
def test_another_conversation(kind: str) -> None:
    """Trap 1: of tokens that differ at position 5 at most 5 are reused; never the old prompt's answer."""
    model, cache, ids = model_of(kind), tiered(model_of(kind)), prompt(60)
    take_turn(model, cache, ids)
    other = ids.clone()
    other[0, 5] = 3 if other[0, 5] != 3 else 4
    fresh = generate(model, other, stock(model))
    reuse, found = take_turn(model, cache, other)
    assert reuse.tokens <= 5
    assert found.sequences.tolist() == fresh.sequences.tolist()
    for ours, theirs in zip(found.logits, fresh.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_an_edit_of_the_last_turn() -> None:
    """A window goes back by up to a block exactly; further back the prompt is computed anew, and the reason says so."""
    model = model_of("gemma3")
    cache, ids = tiered(model), prompt(300)
    take_turn(model, cache, ids)
    near = torch.cat([ids[:, :280], prompt(30, seed=7)], dim=1)
    reuse, found = take_turn(model, cache, near)
    assert reuse.tokens == 280
    assert found.sequences.tolist() == generate(model, near, stock(model)).sequences.tolist()
    far = torch.cat([ids[:, :150], prompt(30, seed=8)], dim=1)
    reuse, found = take_turn(model, cache, far)
    assert reuse.tokens == 0
    assert "window" in reuse.reason
    assert found.sequences.tolist() == generate(model, far, stock(model)).sequences.tolist()


def test_a_recurrent_state_stands_for_exactly_its_tokens() -> None:
    """A hybrid's state is not cut: an edited prompt is computed anew, and the reason says so."""
    model = model_of("qwen3-next")
    cache, ids = tiered(model), prompt(80)
    take_turn(model, cache, ids)
    edited = torch.cat([ids[:, :70], prompt(20, seed=7)], dim=1)
    reuse, found = take_turn(model, cache, edited)
    assert reuse.tokens == 0
    assert "recurrent" in reuse.reason
    assert_same(found, generate(model, edited, stock(model)))


@pytest.mark.parametrize("kind", CROPPED)
def test_beams_on_a_restored_prefix(kind: str) -> None:
    """Trap 7: one row becomes as many as there are beams; afterwards the prompt is still known."""
    model, ids = model_of(kind), prompt(90)
    live, cache = stock(model), tiered(model)
    first = generate(model, ids, live)
    take_turn(model, cache, ids)
    ids = torch.cat([first.sequences, prompt(20, seed=5)], dim=1)
    live.batch_repeat_interleave(4)
    theirs = generate(model, ids, live, num_beams=4)
    reuse, ours = take_turn(model, cache, ids, num_beams=4)
    assert reuse.tokens == 101
    assert_same(ours, theirs)
    assert cache.tokens == ids[0].tolist()
    assert len(cache.batch.rows) == 1
    assert cache.batch.rows[0].length == ids.shape[1]


@pytest.mark.parametrize("kind", CROPPED)
def test_forks_go_on_each_for_itself(kind: str) -> None:
    """A copy shares all blocks; both answer as if alone, whoever writes first."""
    model, ids = model_of(kind), prompt(100)
    cache = tiered(model)
    first = generate(model, ids, stock(model))
    take_turn(model, cache, ids)
    used = cache.device_tier.used_bytes
    other = copy.deepcopy(cache)
    assert cache.device_tier.used_bytes == used
    prompts = [torch.cat([first.sequences, prompt(30, seed=seed)], dim=1) for seed in (5, 6)]
    for each, ids in zip((other, cache), prompts, strict=True):
        live = stock(model)
        generate(model, prompt(100), live)
        theirs = generate(model, ids, live)
        reuse, ours = take_turn(model, each, ids)
        assert reuse.tokens == 111
        assert_same(ours, theirs)
    cache.close()
    assert other.device_tier.used_bytes == other.nbytes
    other.close()
    assert other.device_tier.used_bytes == 0


def test_several_texts_at_once_reuse_nothing() -> None:
    """A batch is computed as always, and the reason says that nothing of it is reused."""
    model, cache, ids = model_of("llama"), tiered(model_of("llama")), prompt(40, rows=2)
    reuse, found = take_turn(model, cache, ids)
    assert (reuse.tokens, reuse.source) == (0, Source.NONE)
    assert "several" in reuse.reason
    assert_same(found, generate(model, ids, stock(model)))
    assert cache.tokens == []
    assert take_turn(model, cache, prompt(40))[0].tokens == 0


def test_an_encoder_decoder_model_reuses_nothing_by_tokens() -> None:
    """What its decoder keeps depends on the encoder's input, too."""
    model = model_of("t5")
    cache, ids = tiered(model), prompt(30)
    for _ in range(2):
        assert cache.begin([0]).tokens == 0
        found = generate(model, ids, cache.with_cross_attention())
        assert_same(found, generate(model, ids, stock(model)))
        cache.end(found.sequences)


def test_an_encoder_decoder_model_does_not_take_a_cache_alone() -> None:
    """Its cross-attention would write into it too, and the answer be wrong without a word: told, and nothing stays."""
    model = model_of("t5")
    cache, ids = tiered(model), prompt(30)
    for _ in range(2):
        with pytest.raises(BadUsage, match="cross-attention") as refused:
            generate(model, ids, cache)
        assert "with_cross_attention()" in (refused.value.hint or "")
        assert cache.device_tier.used_bytes == 0
    assert_same(generate(model, ids, cache.with_cross_attention()), generate(model, ids, stock(model)))


def test_an_end_that_does_not_follow_its_begin_is_refused() -> None:
    """Tokens that do not begin with the prompt are no answer to it; nothing of the turn stays."""
    cache = tiered(model_of("llama"))
    ids = prompt(30)
    cache.begin(ids)
    found = generate(model_of("llama"), ids, cache)
    found.sequences[0, 7] += 1
    with pytest.raises(CacheMismatch, match="token 7"):
        cache.end(found.sequences)
    assert cache.get_seq_length() == 0
    assert cache.device_tier.used_bytes == 0


class Stop(Exception):
    """Raised in the middle of a pass."""


@pytest.mark.parametrize(("kind", "turns"), [("llama", 1000), ("gemma3", 150), ("gemma3-short", 150), ("jamba", 20)])
def test_a_thousand_cancels_leave_nothing(kind: str, turns: int) -> None:
    """A turn called off in any layer of any pass: what stays is right, and in the end every block is free."""
    model = model_of(kind)
    device = DeviceTier(read_geometry(model), 1 << 21)
    generator = random.Random(0)
    texts = [prompt(generator.randint(1, 150), seed=seed) for seed in range(6)]
    caches = [TieredCache(device=device) for _ in range(3)]
    for number in range(turns):
        cache, ids = generator.choice(caches), generator.choice(texts)
        with pytest.raises((Stop, KvFull)), cache.turn(ids):
            break_off(model, cache, ids, generator)
        known = cache.tokens
        assert known == ids[0, : len(known)].tolist()
        assert cache.get_seq_length() == len(known)
        if number % 50 == 0:
            reuse, found = take_turn(model, cache, ids, new=3)
            assert found.sequences.tolist() == generate(model, ids, stock(model), new=3).sequences.tolist()
            assert reuse.tokens <= len(known)
            cache.reset()
    for cache in caches:
        cache.close()
    assert device.used_bytes == 0
    assert [ground.free for ground in device.grounds] == [ground.blocks for ground in device.grounds]


def break_off(model: Any, cache: TieredCache, ids: Any, generator: random.Random) -> None:
    """Compute in pieces until a random update raises."""
    left = generator.randint(0, 3 * len(cache.layers))
    begun = cache.get_seq_length()
    update = cache.update

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stop
        return update(*args, **kwargs)

    cache.update = counted  # type: ignore[method-assign]
    try:
        while True:
            new = generator.randint(1, 40)
            piece = ids[:, begun : begun + new]
            begun += new
            if not piece.shape[1]:
                raise Stop
            with torch.no_grad():
                model(input_ids=piece, past_key_values=cache, use_cache=True)
    finally:
        del cache.update


def test_a_closed_cache_is_refused() -> None:
    """Its blocks are somebody else's now."""
    cache = tiered(model_of("llama"))
    cache.close()
    cache.close()
    with pytest.raises(CacheMismatch, match="closed"):
        generate(model_of("llama"), prompt(5), cache)


def test_a_plain_cache_can_be_used_again_after_reset() -> None:
    """`reset` is as good as a new cache, for layers with recurrent states, too."""
    model = model_of("jamba")
    cache = tiered(model)
    generate(model, prompt(50, seed=3), cache)
    cache.reset()
    assert_same(generate(model, prompt(70), cache), generate(model, prompt(70), stock(model)))
