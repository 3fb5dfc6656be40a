"""What a model of safetensors is given: told from headers, and checked against the planner of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagein.catalog import engines, estimate_transformers, resolve
from pagein.catalog.allot import allot
from pagein.catalog.estimate_transformers import CUDA_DEVICE, CUDA_HOST, RUNTIME
from pagein.catalog.model import ModelEntry, NeedSource
from pagein.catalog.observed import PeakStore
from pagein.config.schema import Model
from pagein.errors import DoesNotFit
from pagein.memory.snapshot import MachineSnapshot, PoolReading
from pagein.protocol import Capability
from pagein.weights.planning import needs as planner
from pagein.weights.planning.plan import LEAST_SLOTS, MOST_SLOTS, make_plan
from pagein.weights.reading.checkpoint import open_checkpoint
from tests.weights.headers import LLAMA, mixture, write_folder

GIB = 1024**3
RAM = PoolReading("ram", 64 * GIB, None, "test")
MACHINE = MachineSnapshot({"ram": RAM})
WITH_GPU = MachineSnapshot({"ram": RAM, "cuda:0": PoolReading("cuda:0", 24 * GIB, None, "test")})
UNIFIED = MachineSnapshot({"ram": RAM}, unified=True)


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
    monkeypatch.setattr(resolve, "computes_on_gpu", lambda row, options: True)
    monkeypatch.setattr(estimate_transformers, "torch_for_gpus", lambda: 0)
    peaks = PeakStore.open(tmp_path / "peaks.sqlite")

    def act(folder: Path, machine: MachineSnapshot = MACHINE, **settings: Any) -> ModelEntry:
        return resolve.resolve("m", Model(model=folder, **settings), machine, peaks)

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


def test_figures_of_the_plan_are_the_planners() -> None:
    """The same numbers in both places."""
    assert estimate_transformers.CHUNK == planner.CHUNK
    assert (estimate_transformers.SLOTS, estimate_transformers.MOST_SLOTS) == (LEAST_SLOTS, MOST_SLOTS)


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({"architectures": ["BertModel"]}, True),
        ({"architectures": ["T5WithLMHeadModel"], "is_encoder_decoder": True}, True),
        ({"architectures": []}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["GPT2LMHeadModel"]}, False),
    ],
)
def test_what_sees_whole_texts_needs_room_for_them(tmp_path: Path, entry_of, settings: Any, whole: bool) -> None:
    """An encoder cannot take a text in pieces, so activations grow with the context; the planner counts the same."""
    folder = folder_of(tmp_path / "m", SMALL, **settings)
    grown = [entry_of(folder, context=tokens).need.bytes["ram"] for tokens in (512, 2048)]
    planned = [planner.read_needs(open_checkpoint(folder), context=tokens, batch=2).needs for tokens in (512, 2048)]
    kv, beside = planned[1].kv - planned[0].kv, planned[1].activations - planned[0].activations
    width, inner = SMALL[0], max(SMALL[1], 4 * SMALL[0])
    assert beside == (2 * 1536 * (4 * width + 3 * inner) * 4 if whole else 0)
    stacks = 2 if settings.get("is_encoder_decoder") else 1
    assert grown[1] - grown[0] == pytest.approx((kv * stacks + beside) * estimate_transformers.MARGIN, abs=2)


def test_a_position_bias_costs_a_number_for_each_pair_of_tokens(tmp_path: Path, entry_of) -> None:
    """T5 of 8 heads with 2,048 tokens was measured to take 289 MiB, 240 of them for that."""
    plain = folder_of(tmp_path / "plain", SMALL, architectures=["T5EncoderModel"])
    biased = folder_of(tmp_path / "biased", SMALL, architectures=["T5EncoderModel"], relative_attention_num_buckets=32)
    more = 2 * 2 * (SMALL[0] // 64) * 2048**2 * 4
    estimated = [entry_of(folder, context=2048).need.bytes["ram"] for folder in (plain, biased)]
    assert estimated[1] - estimated[0] == pytest.approx(more * estimate_transformers.MARGIN, abs=2)
    plans = [planner.read_needs(open_checkpoint(folder), context=2048, batch=2).needs for folder in (plain, biased)]
    assert plans[1].activations - plans[0].activations == more


@pytest.mark.parametrize("sizes", [SEVEN_B, SMALL])
def test_a_gpu_has_the_weights_and_the_host_the_way_there(tmp_path: Path, entry_of, sizes) -> None:
    """Weights, cache and activations are of the device's pool; process, ring and the part being loaded are of RAM."""
    folder = folder_of(tmp_path / "m", sizes)
    entry = entry_of(folder, WITH_GPU, device="cuda:0", context=512)
    assert (entry.device, entry.pool, entry.problem) == ("cuda:0", "cuda:0", None)
    needs = planner.read_needs(open_checkpoint(folder), context=512, batch=2, runtime=CUDA_DEVICE).needs
    assert needs.whole <= entry.need.bytes["cuda:0"] <= (needs.whole + needs.embedding) * 1.1
    block, host = max(unit.slot_bytes for unit in needs.units), RUNTIME + CUDA_HOST
    wanted = host + MOST_SLOTS * block + max(block, needs.head)
    assert wanted <= entry.need.bytes["ram"] <= wanted * 1.1
    with pytest.raises(DoesNotFit) as refused:
        make_plan(needs, 0)
    least = int(str(refused.value.details["need_bytes"]))
    assert least <= (entry.least or 0) <= least * 1.1


@pytest.mark.parametrize(("wished", "counted"), [("2GiB", 2 * GIB), (GIB, GIB), ("much", 0), (None, 0)])
def test_kv_behind_a_gpu_is_the_hosts(tmp_path: Path, entry_of, wished: object, counted: int) -> None:
    """The pinned tier of conversations is of RAM, and there is none where the model computes there anyway."""
    folder = folder_of(tmp_path / "m", SMALL)
    options = {"kv": {"host": wished}}
    plain = entry_of(folder, WITH_GPU, device="gpu").need.bytes
    behind = entry_of(folder, WITH_GPU, device="gpu", options=options).need.bytes
    assert behind["ram"] - plain["ram"] == pytest.approx(counted * estimate_transformers.MARGIN, abs=2)
    assert behind["cuda:0"] == plain["cuda:0"]
    assert entry_of(folder, options=options).need == entry_of(folder).need


def test_a_declared_memory_is_that_of_the_device(tmp_path: Path, entry_of) -> None:
    """What the host takes beside stays as estimated."""
    folder = folder_of(tmp_path / "m", SEVEN_B)
    plain = entry_of(folder, WITH_GPU, device="gpu")
    declared = entry_of(folder, WITH_GPU, device="gpu", memory="6GiB")
    assert declared.need.bytes == {"ram": plain.need.bytes["ram"], "cuda:0": 6 * GIB}


def test_a_model_larger_than_its_gpu_streams_there(tmp_path: Path, entry_of) -> None:
    """It gets half of what the device's budget can give, and the host's share as it is."""
    folder = folder_of(tmp_path / "m", SEVEN_B)
    entry = entry_of(folder, WITH_GPU, device="gpu")
    budgets = {"ram": 64 * GIB, "cuda:0": 8 * GIB}
    given = allot({"m": entry}, {"m": Model(model=folder)}, budgets)["m"].need.bytes
    assert given == {"ram": entry.need.bytes["ram"], "cuda:0": 4 * GIB}
    roomy = allot({"m": entry}, {"m": Model(model=folder)}, budgets | {"cuda:0": 24 * GIB})["m"]
    assert roomy.need == entry.estimate


def test_a_gpu_is_taken_only_where_it_is_asked_for(tmp_path: Path, entry_of) -> None:
    """`auto` computes on the CPU; one memory for both is refused, since the weights would be in it twice."""
    folder = folder_of(tmp_path / "m", SMALL)
    assert entry_of(folder, WITH_GPU).device == "cpu"
    assert "set device: cpu" in (entry_of(folder, UNIFIED, device="gpu").problem or "")
    assert entry_of(folder, UNIFIED).problem is None


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
