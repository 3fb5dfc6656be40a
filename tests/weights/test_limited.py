"""A model larger than its memory, in a memory group of the kernel that counts everything, page cache included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common.group import V1, V2, Group, memory_group
from common.wire import BenchmarkError
from pagein.catalog.gpu_build import torch_for_gpus
from pagein.weights.planning.needs import RUNTIME

pytestmark = pytest.mark.torch
can_group = pytest.mark.skipif(not os.access(V1 if V1.is_dir() else V2, os.W_OK), reason="no memory group can be made")


def made(folder: Path, **sizes: Any) -> Path:
    """Write a random Llama in fp32."""
    config = transformers.LlamaConfig(
        vocab_size=4096, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=1024, **sizes
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="400MB")
    return folder


def run(folder: Path, limit: int, memory: int, tokens: int) -> tuple[dict[str, Any], int, int]:
    """Generate in a group of ``limit`` bytes; returns what the child saw, the group's peak, processes killed."""
    try:
        with memory_group(limit) as group:
            told = _child(group, folder, memory, tokens)
            return told, group.peak(), group.killed()
    except BenchmarkError as error:
        pytest.skip(str(error))


def _child(group: Group, folder: Path, memory: int, tokens: int) -> dict[str, Any]:
    arguments = [str(group.folder), str(folder), str(memory), str(tokens)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("limited.py")), *arguments],
        capture_output=True, text=True, env=environment, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@can_group
def test_a_model_runs_in_a_third_of_its_bytes(tmp_path: Path) -> None:
    """Within a third of its weights' bytes a model says what a full load says; never killed, never over the limit."""
    folder = made(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=30)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = weights // 3
    told, peak, killed = run(folder, limit, limit, 6)
    assert not told["fits"]
    assert killed == 0
    assert peak <= limit
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.inference_mode():
        wanted = full.generate(
            torch.arange(2, 10)[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert told["tokens"] == wanted[0].tolist()


@can_group
def test_memory_stays_flat_over_five_hundred_tokens(tmp_path: Path) -> None:
    """From the tenth token to the five-hundredth the process grows by less than 2 %, its KV cache included."""
    folder = made(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=12)
    limit = 600 * 1024**2
    told, _, killed = run(folder, limit, 0, 500)
    assert killed == 0
    assert not told["fits"]
    assert len(told["resident"]) == 500
    assert max(told["resident"][10:]) <= 1.02 * told["resident"][10]


@can_group
@pytest.mark.engines
def test_a_real_model_says_the_same_in_a_third_of_its_bytes() -> None:
    """SmolLM2 beside what a process takes anyway: 60 tokens as a full load says them, never over the limit.

    Memory is flat but for the KV cache; over 500 tokens that is looked at with a smaller model.
    """
    folder = ROOT / "models" / "smollm2-135m-hf"
    if not folder.is_dir():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = RUNTIME + torch_for_gpus() + weights // 3
    told, peak, killed = run(folder, limit, limit, 60)
    assert not told["fits"]
    assert killed == 0
    assert peak <= limit
    assert max(told["resident"][10:]) <= 1.02 * told["resident"][10] + told["kv"]
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.inference_mode():
        wanted = full.generate(
            torch.arange(2, 10)[None], max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert told["tokens"] == wanted[0].tolist()
