"""Pictures among the tokens (M-RoPE): positions that are off their tokens, and ids that all pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
t = pytest.importorskip("transformers")

from transformers import DynamicCache

from pagein.errors import CacheMismatch
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.snapshots.key import media_tokens
from pagein.kv.tiers.answers import Source
from tests.kv.cache.tiers import ARGUMENT, check_whole, pool_of, words

pytestmark = pytest.mark.torch

PICTURE, VIDEO = 250, 251
SIZES = {"a": (8, 8), "b": (4, 12)}
"""Patches of each picture: 16 tokens that take 4 positions, 12 that take 6."""


def make() -> Any:
    """Return a small model with M-RoPE; made twice, it has the same weights and no offsets."""
    t.logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {
        "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 1, "in_channels": 3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = t.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=PICTURE, video_token_id=VIDEO, vision_start_token_id=252,
        vision_end_token_id=253,
    )  # fmt: skip
    model = t.Qwen2VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.generation_config.suppress_tokens = [PICTURE, VIDEO]
    return model


def said(kind: str, seed: int, after: int = 70) -> list[int]:
    """Return a prompt around a picture of a kind."""
    height, width = SIZES[kind]
    before, behind = words(10, seed), words(after, seed + 1)
    return [*(one % 240 + 1 for one in before), *[PICTURE] * (height * width // 4), *(one % 240 + 1 for one in behind)]


def more(seed: int) -> list[int]:
    """Return what is said next, without a picture."""
    return [one % 240 + 1 for one in words(9, seed)]


def pixels(kind: str, seed: int = 0) -> dict[str, Any]:
    """Return a picture as `generate` takes it."""
    height, width = SIZES[kind]
    noise = torch.randn(height * width, 48, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": noise, "image_grid_thw": torch.tensor([[1, height, width]])}


def told(ids: list[int], digest: str) -> list[int]:
    """Return a text with the picture's own numbers in the place of ids."""
    numbers = iter(media_tokens(digest, ids.count(PICTURE)))
    return [next(numbers) if one == PICTURE else one for one in ids]


def write(model: Any, cache: Any, ids: list[int], picture: dict[str, Any] | None) -> tuple[list[int], list[Any]]:
    """Generate; return all tokens, and the logits of each new one. Without a picture only its text is given."""
    whole = torch.tensor([ids])
    given: dict[str, Any] = {}
    if picture is not None:
        there = cache.get_seq_length() > ids.index(PICTURE)
        given = {name: value for name, value in picture.items() if not (there and name == "pixel_values")}
        given["mm_token_type_ids"] = (whole == PICTURE).long()
    with torch.inference_mode():
        out = model.generate(
            whole, attention_mask=torch.ones_like(whole), **{ARGUMENT: cache}, max_new_tokens=6, do_sample=False,
            output_logits=True, return_dict_in_generate=True, **given,
        )  # fmt: skip
    return [int(one) for one in out.sequences[0]], list(out.logits)


class Talk:
    """A conversation about one picture, and what it is with a model and a stock cache of its own."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed, self.digest, self.ids = kind, seed, f"{kind}{seed}" * 8, said(kind, seed)
        self._plain = make(), DynamicCache(config=make().config.get_text_config())

    def want(self) -> tuple[list[int], list[Any]]:
        """What the next turn has to be."""
        model, cache = self._plain
        return write(model, cache, self.ids, pixels(self.kind, self.seed))

    def turn(self, model: Any, cache: TieredCache, bare: bool = False) -> Any:
        """Take a turn, check it, and let the next be said; ``bare``: nothing of the picture is given any more."""
        want = self.want()
        with cache.turn(told(self.ids, self.digest)) as one:
            out = write(model, cache, self.ids, None if bare else pixels(self.kind, self.seed))
            one.end(out[0])
        assert out[0] == want[0]
        assert all(torch.equal(mine, other) for mine, other in zip(out[1], want[1], strict=True))
        self.ids = [*out[0], *more(self.seed)]
        return one.reuse


@pytest.mark.parametrize("restart", [False, True])
def test_offsets_survive_the_round_trip(restart: bool, tmp_path: Path):
    """Scenario 22: each conversation goes on at its own positions, whichever the model computed last, and in a new
    process, whose model knows none."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    talks = {name: Talk(kind, seed) for seed, (name, kind) in enumerate({"x": "a", "y": "b", "z": "a"}.items(), 1)}
    for name, talk in talks.items():
        assert talk.turn(model, pool.open(name)).tokens == 0
    offsets = model.model.rope_deltas.item()
    assert offsets == -12
    for _ in range(2):
        if restart:
            pool.close()
            model = make()
            pool = pool_of(model, 40, tmp_path)
        for name, talk in talks.items():
            known = len(talk.ids) - 10
            reuse = talk.turn(model, pool.open(name))
            assert reuse.tokens == known
            assert reuse.source is (Source.DISK if restart else Source.LIVE)
    check_whole(pool)
    pool.close()


def test_offsets_hold_where_only_text_is_given():
    """What is cached need not be given again: the offsets of a conversation come back with it, and go with a fork."""
    model = make()
    pool = pool_of(model, 40)
    one, two = Talk("a", 1), Talk("b", 2)
    caches = pool.open("x"), pool.open("y")
    for bare in (False, True, True):
        one.turn(model, caches[0], bare)
        two.turn(model, caches[1], bare)
    with caches[0].turn(told(one.ids, one.digest)):
        pass  # called off before anything was computed
    two.turn(model, caches[1].fork(), bare=True)
    one.turn(model, caches[0], bare=True)
    pool.close()


def test_offsets_of_two_turns_at_once():
    """Of turns that meet nobody knows whose offsets the model has at their end: the next ones compute them anew."""
    model = make()
    pool = pool_of(model, 40)
    talks = Talk("a", 1), Talk("b", 2)
    caches = [pool.open(), pool.open()]
    for talk, cache in zip(talks, caches, strict=True):
        cache.begin(told(talk.ids, talk.digest))
    for talk, cache in zip(reversed(talks), reversed(caches), strict=True):
        want, out = talk.want(), write(model, cache, talk.ids, pixels(talk.kind, talk.seed))
        assert out[0] == want[0]
        talk.ids = out[0]
    for talk, cache in zip(talks, caches, strict=True):
        cache.end(talk.ids)
        talk.ids = [*talk.ids, *more(talk.seed)]
    for talk, cache in zip(talks, caches, strict=True):
        assert talk.turn(model, cache).tokens == len(talk.ids) - 6 - 9 - 10
    pool.close()


@pytest.mark.parametrize("with_pool", [False, True])
def test_another_picture_is_another_text(with_pool: bool, tmp_path: Path):
    """Scenario 20: same words, same ids, another picture: nothing from it on is reused, though nobody told them apart;
    who does has all of it."""
    model = make()
    pool = pool_of(model, 40, tmp_path) if with_pool else None
    cache = pool.open("c") if pool is not None else TieredCache(model, memory="4MiB")
    ids, plain = said("a", 1), make()
    for seed in (1, 2, 2):
        with cache.turn(ids) as one:
            out = write(model, cache, ids, pixels("a", seed))
            one.end(out[0])
        want = write(plain, DynamicCache(config=plain.config.get_text_config()), ids, pixels("a", seed))
        assert out[0] == want[0]
        assert all(torch.equal(mine, other) for mine, other in zip(out[1], want[1], strict=True))
        assert one.reuse.tokens == (0 if seed == 1 else 10)
        assert "those of any picture" in one.reuse.reason
    for digest, reused in (("p" * 64, 10), ("p" * 64, len(ids) - 1), ("q" * 64, 10)):
        with cache.turn(told(ids, digest)) as one:
            one.end(write(model, cache, ids, pixels("a", 3))[0])
        assert one.reuse.tokens == reused
    if pool is not None:
        pool.close()


def test_an_answer_to_another_picture_is_refused():
    """A text that has a picture where its prompt had a word is not the prompt's."""
    model = make()
    cache = TieredCache(model, memory="4MiB")
    ids = said("a", 1)
    cache.begin(ids)
    write(model, cache, ids, pixels("a"))
    with pytest.raises(CacheMismatch):
        cache.end([*ids[:3], PICTURE, *ids[4:]])
    assert cache.get_seq_length() == 0
