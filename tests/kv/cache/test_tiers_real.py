"""64 conversations on real weights whose KV is ten times the device's budget."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.kv.cache.tiers import Plain, check_whole, pool_of, turn

pytestmark = pytest.mark.engines

FOLDER = Path(__file__).parents[3] / "models" / "smollm2-135m-hf"


@pytest.fixture(scope="module")
def model():
    """SmolLM2 as Hugging Face's library loads it."""
    if not (FOLDER / "config.json").is_file():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    found = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    found.generation_config.eos_token_id = None
    found.generation_config.pad_token_id = 0
    return found


def test_ten_times_the_budget(model, tmp_path: Path):
    """Each of 128 answers equals that of unlimited plain caches, nothing fails, the device stays in its budget."""
    chance, plain = random.Random(7), Plain(model)
    pool = pool_of(model, 11, tmp_path / "kv")
    said: dict[str, list[int]] = {}
    order = [f"c{number}" for number in range(64)] * 2
    chance.shuffle(order)
    for at, name in enumerate(order):
        prompt = [*said.get(name, []), *(chance.randrange(1000, 40000) for _ in range(chance.randrange(30, 70)))]
        said[name] = plain.turn(name, prompt, 4)
        out, reuse = turn(pool, model, name, prompt, 4)
        assert out == said[name], (at, name, reuse)
    need = sum(pool.geometry.kv_bytes(len(tokens)) for tokens in said.values())
    assert need > 10 * pool.device.memory
    assert pool.report().dropped_blocks == 0
    check_whole(pool)
    pool.close()
