"""What a model of safetensors is given: told from headers, and checked against the planner of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagein.catalog import engines, estimate_transformers, resolve
from pagein.catalog.estimate_transformers import RUNTIME
from pagein.catalog.model import ModelEntry, NeedSource
from pagein.catalog.observed import PeakStore
from pagein.config.schema import Model
from pagein.errors import DoesNotFit
from pagein.memory.snapshot import MachineSnapshot, PoolReading
from pagein.protocol import Capability
from pagein.weights import needs as planner
from pagein.weights.checkpoint import open_checkpoint
from pagein.weights.plan import make_plan
from tests.weights.headers import LLAMA, mixture, write_folder

MACHINE = MachineSnapshot({"ram": PoolReading("ram", 64 * 1024**3, None, "test")})


def shapes_of(hidden: int, inner: int, layers: int, words: int, cached: int) -> dict[str, tuple[int, ...]]:
    """A decoder of Llama's kind."""
    block = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "self_attn.k_proj": (cached, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (cached, hidden),
    }
    blocks = {f"model.layers.{at}.{name}.weight": shape for at in range(layers) for name, shape in block.items()}
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)
    }  # fmt: skip
    return blocks | ends


SEVEN_B = (4096, 14336, 32, 32000, 1024)
SMALL = (576, 1536, 30, 49152, 192)


def folder_of(path: Path, sizes: tuple[int, int, int, int, int], **config: Any) -> Path:
    """A folder of headers alone."""
    hidden, inner, layers, words, cached = sizes
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "vocab_size": words,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": cached // 64, "max_position_embeddings": 8192,
    }  # fmt: skip
    return write_folder(path, shapes_of(*sizes), settings | config)


@pytest.fixture
def entry_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Resolve a folder as if everything were installed."""
    monkeypatch.setattr(engines, "version", lambda name: "1.0")
    peaks = PeakStore.open(tmp_path / "peaks.sqlite")

    def act(folder: Path, **settings: Any) -> ModelEntry:
        return resolve.resolve("m", Model(model=folder, **settings), MACHINE, peaks)

    act.peaks = peaks  # type: ignore[attr-defined]
    yield act
    peaks.close()


@pytest.mark.parametrize("sizes", [SEVEN_B, SMALL])
@pytest.mark.parametrize("context", [512, 4096])
def test_whole_and_least_are_those_of_the_planner(tmp_path: Path, entry_of, sizes, context: int) -> None:
    """Never less than a plan of the same model counts, and no more than a tenth above it."""
    folder = folder_of(tmp_path / "m", sizes)
    entry = entry_of(folder, context=context)
    needs = planner.read_needs(open_checkpoint(folder), context=context, batch=2, runtime=RUNTIME).needs
    with pytest.raises(DoesNotFit) as refused:
        make_plan(needs, 0)
    least = int(str(refused.value.details["need_bytes"]))
    assert least <= (entry.least or 0) <= least * 1.1
    assert needs.whole <= entry.need.bytes["ram"] <= (needs.whole + needs.embedding) * 1.1


@pytest.mark.parametrize("fused", [True, False])
def test_routed_experts_are_not_needed_all_at_once(tmp_path: Path, entry_of, fused: bool) -> None:
    """One block's active ones are enough, whether they are stored one by one or as one tensor."""
    config = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    entry = entry_of(write_folder(tmp_path / "m", mixture(fused), config), context=64)
    assert entry.info is not None
    assert entry.info.metadata["largest_experts"] == 8 * 3 * 32 * 64 * 2
    dense = entry.info.metadata["largest_block"]
    assert dense == (3 * 64 * 64 + 2 * 32 * 64 + 64 - 64 * 64 + 3 * 256 * 64) * 2


def test_a_chunk_is_the_planners() -> None:
    """The same number in both places."""
    assert estimate_transformers.CHUNK == planner.CHUNK


def test_the_engine_of_a_folder_is_found(tmp_path: Path, entry_of) -> None:
    """A folder with a config is served by transformers, with two requests of a bounded context at once."""
    entry = entry_of(folder_of(tmp_path / "m", SMALL))
    assert (entry.engine, entry.problem, entry.context) == ("transformers", None, 4096)
    assert entry.capabilities == {Capability.COMPLETION, Capability.EMBEDDING}
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ x }}")
    assert Capability.CHAT in entry_of(tmp_path / "m").capabilities
    embedder = entry_of(folder_of(tmp_path / "e", SMALL, architectures=["BertModel"]))
    assert embedder.capabilities == {Capability.EMBEDDING}


def test_what_was_measured_changes_nothing(tmp_path: Path, entry_of) -> None:
    """It takes what it is given, so a peak says nothing about what it needs."""
    folder = folder_of(tmp_path / "m", SMALL)
    entry = entry_of(folder)
    entry_of.peaks.remember(entry.peak_key, "m", {"ram": 1 << 40})
    assert entry_of(folder).need == entry.need
    declared = entry_of(folder, memory="700MiB")
    assert (declared.need.bytes, declared.need.source) == ({"ram": 700 * 1024**2}, NeedSource.DECLARED)


def test_fewer_bits_need_less(tmp_path: Path, entry_of) -> None:
    """Compressed weights count as such, whole and streamed; wider ones too."""
    folder = folder_of(tmp_path / "m", SEVEN_B)
    whole = [entry_of(folder, options={"compression": kind}) for kind in ("4bit", "8bit")]
    plain, wide = entry_of(folder), entry_of(folder, options={"dtype": "float32"})
    order = [*whole, plain, wide]
    assert [e.need.bytes["ram"] for e in order] == sorted(e.need.bytes["ram"] for e in order)
    assert [e.least for e in order] == sorted(e.least for e in order)
