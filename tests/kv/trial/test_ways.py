"""Ways to keep KV under one load: the same words, and each pays where it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.errors import EngineMissing
from pagein.kv.cache.reading import read_geometry
from pagein.kv.trial import probe, run
from pagein.kv.trial.load import users
from pagein.kv.trial.ways import WAYS, Fitting, Full, Limits, Offloaded, Recompute, Stock, Tiered, Way

pytestmark = pytest.mark.torch
WORDS = 200
LOAD = users(4, turns=3, document=40, question=6, answer=5)


@pytest.fixture(scope="module")
def model() -> Any:
    """A small model with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def bytes_of(model: Any, tokens: int) -> int:
    """KV of so many tokens."""
    return tokens * read_geometry(model).bytes_per_token


def serve(way: Way) -> tuple[list[Any], dict[int, list[int]]]:
    """Serve the load; returns what each turn cost, and what was said in the end."""
    said: dict[int, list[int]] = {}
    return run.serve(way, LOAD, WORDS, lambda _: None, said), said


def limits_of(name: str, model: Any, folder: Path) -> Limits:
    """Room for all where it may be, for one and a half conversations where it is tiers."""
    if name == "tiered":
        return Limits(bytes_of(model, 256), disk=folder)
    return Limits(bytes_of(model, 4 * 512))


@pytest.mark.parametrize("name", [name for name in sorted(WAYS) if name not in ("offloaded",)])
def test_every_way_says_the_same(model, name, tmp_path):
    """What differs is what it costs, not what is said."""
    way, expected = WAYS[name](model, limits_of(name, model, tmp_path)), serve(Recompute(model, Limits()))[1]
    served, said = serve(way)
    way.close()
    assert [one.failure for one in served] == [None] * 12
    assert said == expected


def test_a_cache_computes_what_is_new_and_recomputing_everything(model):
    """A returning turn has its question and the last token of the answer before."""
    stock = [one.computed for one in serve(Stock(model, Limits()))[0]]
    assert stock == [40] * 4 + [7] * 8
    anew = [one.computed for one in serve(Recompute(model, Limits()))[0]]
    assert anew == [40] * 4 + [51] * 4 + [62] * 4


def test_tiers_compute_what_is_new_in_a_fraction_of_the_memory(model, tmp_path):
    """Four conversations of two blocks in room for four blocks, the rest on the disk."""
    way = Tiered(model, Limits(bytes_of(model, 256), disk=tmp_path))
    served, _ = serve(way)
    way.close()
    assert [one.computed for one in served] == [40] * 4 + [7] * 8


def test_what_does_not_fit_is_refused_with_both_numbers(model):
    """As an out-of-memory error is; the caches of others stay."""
    way = Stock(model, Limits(bytes_of(model, 60)))
    way.turn(0, list(range(40)), 5)
    with pytest.raises(Full, match=r"out of memory: .* beside .* of others, in "):
        way.turn(1, list(range(40)), 5)
    assert way.turn(0, list(range(45)), 5).computed == 1


def test_a_refused_turn_is_counted_and_asked_again_with_the_next(model):
    """Its user loses nothing of the text: the next prompt has both questions."""
    served, said = serve(Stock(model, Limits(bytes_of(model, 100))))
    assert sum(one.failure is not None for one in served) > 0
    assert all(len(tokens) >= 40 + 2 * 6 for tokens in said.values())


def test_the_last_used_caches_stay_as_far_as_they_fit(model):
    """One that left is computed anew, one that stayed is not."""
    way = Fitting(model, Limits(bytes_of(model, 100)))
    said = {user: way.turn(user, [user, *range(39)], 5).tokens for user in range(3)}  # room for two
    assert way.turn(2, [*said[2], 1], 5).computed == 2
    assert way.turn(0, [*said[0], 1], 5).computed == 46


def test_conversations_led_before_are_taken_over_as_far_as_they_fit(model):
    """The last ones, and what they say next costs what it would have."""
    histories = [(user, [user, *range(44)]) for user in range(3)]
    way = Fitting(model, Limits(bytes_of(model, 100)))
    way.recall(histories)
    assert way.turn(2, [*histories[2][1], 1], 5).computed == 2
    assert way.turn(1, [*histories[1][1], 1], 5).computed == 2


def test_the_offloaded_cache_says_that_it_needs_cuda(model):
    """A row without a number has its reason."""
    with pytest.raises(EngineMissing, match="CUDA only"):
        Offloaded(model, Limits())


def test_a_run_begins_with_what_another_wrote(model, tmp_path):
    """Histories are written after the first turns, and a run that finds them begins with the second ones."""
    saved = tmp_path / "histories.json"
    whole = run.run(model, "stock", Limits(), LOAD, lambda _: None, saved)
    assert {int(user): len(tokens) for user, tokens in json.loads(saved.read_text()).items()} == dict.fromkeys(
        range(4), 45
    )
    later = run.run(model, "recompute", Limits(), LOAD, lambda _: None, saved)
    assert (later["all"]["turns"], later["returning"]["turns"]) == (8, 8)
    assert later["said"] == whole["said"]


def test_without_a_budget_it_is_that_of_four_conversations(model):
    """Row K3: four active ones, each with its reserve."""
    assert run.usual_memory(model, LOAD) == int(1.3 * 4 * read_geometry(model).kv_bytes(LOAD.longest))


def lines_of(capsys: Any) -> list[dict[str, Any]]:
    """What a module printed."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_a_trial_tells_its_progress_and_its_figures(model, tmp_path, capsys):
    """The last line is the result: that is all that the command line reads."""
    model.save_pretrained(tmp_path / "m")
    users_of = ["--users", "2", "--turns", "2", "--document", "20", "--question", "4", "--answer", "3"]
    assert run.main([str(tmp_path / "m"), "--way", "stock", "--device", "cpu", *users_of]) == 0
    lines = lines_of(capsys)
    assert [(line["done"], line["of"]) for line in lines[:-1]] == [(n, 4) for n in range(1, 5)]
    assert (lines[-1]["event"], lines[-1]["all"]["turns"], lines[-1]["all"]["answered_tokens"]) == ("ran", 4, 12)
    assert lines[-1]["memory"]["peak_bytes"] > 0


def test_a_trial_tells_its_error(model, tmp_path, capsys):
    """With code and hint, so that the command line can raise it as its own."""
    model.save_pretrained(tmp_path / "m")
    assert run.main([str(tmp_path / "m"), "--way", "offloaded", "--device", "cpu", "--requests", "1"]) == 1
    assert lines_of(capsys)[-1]["code"] == EngineMissing.code


def test_the_probe_tells_what_a_model_costs(model, tmp_path, capsys, monkeypatch):
    """Bytes a token, seconds of prompts of growing length, and speeds of copies."""
    monkeypatch.setattr(probe, "_COPY", 1 << 20)
    model.save_pretrained(tmp_path / "m")
    assert probe.main([str(tmp_path / "m"), "--device", "cpu"]) == 0
    told = lines_of(capsys)[-1]
    assert told["bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, dim, bytes
    assert [tokens for tokens, _ in told["prefill"]] == [64, 256]
    assert all(seconds > 0 for _, seconds in told["prefill"])
    assert told["copy_bps"] > 0
    assert told["context"] == 512


@pytest.mark.parametrize("name", ["stock", "recompute", "tiered"])
def test_an_encoder_decoder_model_is_served_and_keeps_nothing(name, tmp_path):
    """What its decoder keeps depends on the whole input: every turn computes all of it, in every way (row K9)."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, vocab_size=WORDS, decoder_start_token_id=0)
    ).eval()
    way = WAYS[name](t5, Limits(1 << 24, disk=tmp_path))
    served, said = serve(way)
    way.close()
    assert [one.computed for one in served] == [40] * 4 + [51] * 4 + [62] * 4
    assert said == serve(Recompute(t5, Limits()))[1]
