"""A checkpoint several times the budget beside small models: all are served, and the budget holds."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "five_models"
sys.path.insert(0, str(EXAMPLE))

from observer import Observer

pytestmark = pytest.mark.engines
MIB = 1024**2
WIDTH, LAYERS, INNER, WORDS, KEYS = 3584, 28, 18944, 152064, 512
"""Qwen2.5-7B."""
SHAPES = {
    "input_layernorm.weight": [WIDTH],
    "post_attention_layernorm.weight": [WIDTH],
    "self_attn.q_proj.weight": [WIDTH, WIDTH],
    "self_attn.q_proj.bias": [WIDTH],
    "self_attn.k_proj.weight": [KEYS, WIDTH],
    "self_attn.k_proj.bias": [KEYS],
    "self_attn.v_proj.weight": [KEYS, WIDTH],
    "self_attn.v_proj.bias": [KEYS],
    "self_attn.o_proj.weight": [WIDTH, WIDTH],
    "mlp.gate_proj.weight": [INNER, WIDTH],
    "mlp.up_proj.weight": [INNER, WIDTH],
    "mlp.down_proj.weight": [WIDTH, INNER],
}


def write_zeros(path: Path, shapes: dict[str, list[int]]) -> int:
    """Write a safetensors file of zeros in bf16 that takes no disk: a hole behind its header; returns its bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2
        for side in shape:
            nbytes *= side
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.fixture
def large(tmp_path):
    """A folder of 15 GB, as it seems."""
    folder = tmp_path / "large"
    folder.mkdir()
    for file in (ROOT / "models" / "smollm2-135m-hf").iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            shutil.copy(file, folder)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": WIDTH, "vocab_size": WORDS,
        "num_hidden_layers": LAYERS, "intermediate_size": INNER, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    files = {"ends": {"model.embed_tokens.weight": [WORDS, WIDTH], "model.norm.weight": [WIDTH]}}
    files["ends"]["lm_head.weight"] = [WORDS, WIDTH]
    for layer in range(LAYERS):
        files[f"{layer:02}"] = {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    total = sum(write_zeros(folder / f"model-{name}.safetensors", shapes) for name, shapes in files.items())
    index = {name: f"model-{file}.safetensors" for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert total > 14e9
    return folder


def asks_large(d):
    """One token, for which all of its weights pass."""
    reply = d.call("POST", "/v1/completions", {"model": "large", "prompt": "abc", "max_tokens": 1, "temperature": 0})
    assert reply.status == 200, reply.body
    assert reply.json["usage"]["completion_tokens"] == 1


def test_a_model_five_times_the_budget_takes_turns_with_small_ones(start, large):
    """15 GB of weights, a sentence model and a small language model under 2.6 GiB: each answers, the sum stays below.

    The large one leaves for the small ones and comes back for its next request.
    """
    if not (ROOT / "models" / "smollm2-135m").is_dir():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    models = ROOT / "models"
    d = start(
        "2600MiB",
        f"  large: {{model: {large}, memory: 2200MiB, context: 128, device: cpu, timeout: 120s}}\n"
        f"  embed: {{model: {models / 'minilm'}, recipe: embedding}}\n"
        f"  answer: {{model: {models / 'smollm2-135m'}, context: 512, timeout: 60s}}\n",
    )
    observer = Observer(d.process.pid)
    observer.start()
    asks_large(d)
    assert d.call("POST", "/v1/embeddings", {"model": "embed", "input": "a cat"}).status == 200
    assert d.chat("answer", max_tokens=4).status == 200
    assert len(d.decisions("stop", "large")) == 1
    asks_large(d)
    observer.stop()
    d.tree()
    assert 0 < observer.highest <= 2600 * MIB
    assert d.pool()["highest_measured"] <= d.pool()["budget"]
    assert d.decisions("refuse") == []
    assert d.stop() == 0
    assert d.left() == []
