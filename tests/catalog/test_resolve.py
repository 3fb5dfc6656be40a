"""From a configured model to what the daemon needs to know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagein.catalog import device, engines, gpu_build, resolve
from pagein.catalog.model import ModelEntry, NeedSource
from pagein.catalog.observed import PeakStore
from pagein.catalog.resolve import with_headroom
from pagein.config.schema import Model
from pagein.memory.snapshot import MachineSnapshot, PoolReading
from pagein.protocol import Capability
from tests.catalog.build import SMALL_LLAMA, ct2_folder, f32, gguf, graph, node, onnx, safetensors, tensor, write

MIB = 1024**2
GIB = 1024**3
CHAT = {**SMALL_LLAMA, "tokenizer.chat_template": "{{ x }}"}


def pool(name: str, total: int = 64 * GIB, available: int | None = None) -> PoolReading:
    """A pool of a machine."""
    return PoolReading(name, total, available, "test")


PLAIN = MachineSnapshot({"ram": pool("ram")})
TWO_GPUS = MachineSnapshot(
    {"ram": pool("ram"), "cuda:0": pool("cuda:0", available=10 * GIB), "cuda:1": pool("cuda:1", available=20 * GIB)}
)
UNIFIED = MachineSnapshot({"ram": pool("ram")}, unified=True)

Resolve = Callable[..., ModelEntry]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are installed, and no llama-server is on the PATH."""
    monkeypatch.setattr(engines, "version", lambda name: "1.0")
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    monkeypatch.setattr(resolve.shutil, "which", lambda name: None)
    monkeypatch.setattr(resolve, "computes_on_gpu", lambda row, options: True)


@pytest.fixture
def peaks(tmp_path: Path) -> PeakStore:
    """An empty store."""
    return PeakStore.open(tmp_path / "state" / "peaks.sqlite")


@pytest.fixture
def of(tmp_path: Path, peaks: PeakStore) -> Resolve:
    """Resolve a model of these bytes (or this path) with settings."""

    def act(data: bytes | Path, machine: MachineSnapshot = PLAIN, **settings: Any) -> ModelEntry:
        path = data if isinstance(data, Path) else write(tmp_path / "m", data)
        return resolve.resolve("m", Model(model=path, **settings), machine, peaks)

    return act


def command(peaks: PeakStore, machine: MachineSnapshot = PLAIN, **settings: Any) -> ModelEntry:
    """Resolve a command."""
    return resolve.resolve("m", Model(command="srv --port ${port}", **settings), machine, peaks)


# ── what it is ──────────────────────────────────────────────────────────────────────────────


def test_one_key_is_enough(of: Resolve) -> None:
    """A path alone gives engine, version, capabilities, device, context and need."""
    entry = of(gguf(CHAT))
    assert entry.problem is None
    assert (entry.engine, entry.engine_version, entry.device) == ("llama_cpp", "xllamacpp 1.0", "cpu")
    assert entry.capabilities == {Capability.CHAT, Capability.COMPLETION}
    assert entry.context == 2048
    assert entry.need == entry.estimate
    assert entry.need.source is NeedSource.ESTIMATED
    assert entry.need.bytes["ram"] > 56 * MIB


def test_the_default_context_is_bounded(of: Resolve) -> None:
    """A model trained for 128k does not take memory for it unasked; the configured context is taken as it is."""
    long = gguf({**CHAT, "llama.context_length": 131_072})
    assert of(long).context == resolve.DEFAULT_CONTEXT
    assert of(long, context=100_000).context == 100_000


def test_without_a_chat_template_it_completes_only(of: Resolve) -> None:
    """A base model is no chat model, unless a template is configured."""
    assert of(gguf(SMALL_LLAMA)).capabilities == {Capability.COMPLETION}
    assert Capability.CHAT in of(gguf(SMALL_LLAMA), options={"chat_template": "chatml"}).capabilities


@pytest.mark.parametrize(
    ("keys", "capability", "option"),
    [
        ({"llama.pooling_type": 3}, Capability.EMBEDDING, "embedding"),
        ({"llama.pooling_type": 4}, Capability.RERANK, "rerank"),
    ],
)
def test_pooling_makes_an_embedder_or_a_reranker(
    of: Resolve, keys: dict[str, object], capability: Capability, option: str
) -> None:
    """The header's pooling sets the option that the worker is given; the context stays short for a decoder."""
    entry = of(gguf({**CHAT, **keys}))
    assert entry.capabilities == {capability}
    assert entry.options == {option: True}
    assert entry.context == resolve.DEFAULT_VECTOR_CONTEXT


def test_configured_options_win_over_the_header(of: Resolve) -> None:
    """Whoever says that an embedder shall chat gets that; whoever says that a chat model embeds gets that."""
    entry = of(gguf({**CHAT, "llama.pooling_type": 1}), options={"embedding": False})
    assert entry.capabilities == {Capability.CHAT, Capability.COMPLETION}
    assert entry.options == {"embedding": False}
    assert of(gguf(CHAT), options={"embedding": True}).capabilities == {Capability.EMBEDDING}


TEXT_MODEL = onnx(graph([tensor("w", (4,))], [node("A")], ["input_ids", "attention_mask"], ["last_hidden_state"]))


def test_onnx_recipes(of: Resolve) -> None:
    """The recipe decides the capability; where the files leave no doubt it is guessed."""
    guessed = of(TEXT_MODEL)
    assert (guessed.problem, guessed.recipe) == (None, "embedding")
    assert guessed.capabilities == {Capability.EMBEDDING}
    named = of(TEXT_MODEL, recipe="sparse_rerank")
    assert (named.recipe, named.capabilities) == ("sparse_rerank", {Capability.RERANK})


def test_a_misspelt_option_is_told_before_a_load(of: Resolve) -> None:
    """With the nearest one that the engine or its recipe has; a right one, and another engine's, pass."""
    assert (
        of(gguf(CHAT), options={"gpu_layer": 3}).problem == "there is no option 'gpu_layer'; did you mean 'gpu_layers'?"
    )
    assert "no option 'x'; known: args, batch" in (of(gguf(CHAT), options={"x": 1}).problem or "")
    embedder = of(TEXT_MODEL, options={"prepack": False, "max_token": 9})
    assert embedder.problem == "there is no option 'max_token'; did you mean 'max_tokens'?"
    assert of(TEXT_MODEL, options={"prepack": False, "max_tokens": 9}).problem is None
    assert of(gguf(CHAT), options={"gpu_layers": 3}).problem is None


def test_an_onnx_model_without_recipe_says_so(of: Resolve) -> None:
    """The problem lists the recipes."""
    image = onnx(graph([tensor("w", (4,))], [node("Conv")], ["pixels"], ["logits"]))
    assert "set `recipe` to one of embedding" in (of(image).problem or "")
    assert "no recipe 'embeding'" in (of(image, recipe="embeding").problem or "")


def test_a_recipe_of_another_engine_is_not_passed_over(of: Resolve) -> None:
    """Who writes `recipe: embedding` beside a GGUF file wants something that it would not do."""
    assert "a recipe is for ONNX models" in (of(gguf(CHAT), recipe="embedding").problem or "")


def test_whisper(of: Resolve, tmp_path: Path) -> None:
    """A CTranslate2 folder transcribes; the worker is given the folder."""
    entry = of(ct2_folder(tmp_path / "w"))
    assert (entry.engine, entry.problem) == ("whisper", None)
    assert entry.capabilities == {Capability.TRANSCRIPTION}
    assert entry.info is not None
    assert entry.info.path == tmp_path / "w"


def test_a_command(peaks: PeakStore) -> None:
    """Chat and completion unless it says otherwise; declared memory, or a stated default."""
    entry = command(peaks)
    assert (entry.engine, entry.info, entry.problem) == ("command", None, None)
    assert entry.capabilities == {Capability.CHAT, Capability.COMPLETION}
    assert entry.need.bytes == {"ram": GIB}
    assert command(peaks, capabilities=["embedding"]).capabilities == {Capability.EMBEDDING}
    assert command(peaks, memory="300MiB").need.bytes == {"ram": 300 * MIB}


# ── what is wrong ───────────────────────────────────────────────────────────────────────────


def test_a_bad_file_is_a_problem_not_an_exception(of: Resolve, tmp_path: Path) -> None:
    """The entry carries the reader's words; a declared need stays."""
    entry = of(b"GGUFxxxx")
    assert "has GGUF version 2021161080; versions 2 and 3 are read" in (entry.problem or "")
    assert entry.info is None
    assert entry.need.bytes == {}
    missing = of(tmp_path / "gone", memory="5MiB")
    assert "No such file" in (missing.problem or "")
    assert missing.need.bytes == {"ram": 5 * MIB}
    assert "run any code" in (of(b"PK\x03\x04").problem or "")


def test_safetensors_without_a_config_cannot_be_served(of: Resolve) -> None:
    """The engine is known; the problem says what is missing."""
    entry = of(safetensors({"a": f32(0, 2)}, 8))
    assert entry.engine == "transformers"
    assert "no config.json" in (entry.problem or "")


def test_a_missing_engine_says_how_to_install_it(of: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra's name stands in the problem; the model is described all the same."""

    def gone(name: str) -> str:
        raise engines.PackageNotFoundError(name)

    monkeypatch.setattr(engines, "version", gone)
    entry = of(gguf(CHAT))
    assert entry.problem == "the engine llama_cpp is not installed: pip install 'pagein[llamacpp]'"
    assert entry.need.bytes["ram"] > 0


def test_an_engine_that_does_not_take_the_format(of: Resolve) -> None:
    """Engine and format are both named."""
    assert "the engine whisper takes ctranslate2" in (of(gguf(CHAT), engine="whisper").problem or "")
    assert "no engine 'llamacpp'" in (of(gguf(CHAT), engine="llamacpp").problem or "")


def test_a_vision_projector_is_no_model(of: Resolve) -> None:
    """It is told before anything is loaded."""
    assert "vision projector" in (of(gguf({"general.architecture": "clip", "general.type": "mmproj"})).problem or "")


# ── which llama.cpp ─────────────────────────────────────────────────────────────────────────


def test_a_llama_server_counts_as_the_engine(of: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its identity is the version, its process is counted, and it makes the library unnecessary."""
    library = of(gguf(CHAT))
    program = write(tmp_path / "llama-server", "#!/bin/sh\n")
    monkeypatch.setattr(engines.shutil, "which", lambda name: str(program) if name == "llama-server" else None)
    monkeypatch.setattr(engines, "installed_version", lambda row: None)
    entry = of(gguf(CHAT))
    assert entry.problem is None
    assert entry.engine_version.startswith("llama-server 10-")
    assert entry.need.bytes["ram"] > library.need.bytes["ram"]
    assert entry.peak_key != library.peak_key


def test_a_configured_program_that_is_absent(of: Resolve) -> None:
    """The library does not step in silently for a program that was asked for."""
    assert "no program 'my-llama'" in (of(gguf(CHAT), options={"server": "my-llama"}).problem or "")
    assert of(gguf(CHAT), options={"server": "builtin"}).problem is None


# ── where it computes ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wanted", "machine", "got"),
    [
        ("cpu", TWO_GPUS, "cpu"),
        ("auto", PLAIN, "cpu"),
        ("auto", TWO_GPUS, "cuda:1"),
        ("gpu", TWO_GPUS, "cuda:1"),
        ("cuda:0", TWO_GPUS, "cuda:0"),
        ("auto", UNIFIED, "cpu"),
        ("gpu", UNIFIED, "cuda:0"),
    ],
)
def test_devices(of: Resolve, wanted: str, machine: MachineSnapshot, got: str) -> None:
    """auto takes the emptiest GPU; with one memory all bytes are RAM's."""
    entry = of(gguf(CHAT), machine, device=wanted)
    assert (entry.device, entry.problem) == (got, None)
    assert set(entry.need.bytes) == ({"ram"} if machine is UNIFIED or got == "cpu" else {"ram", got})


def test_auto_leaves_a_gpu_that_is_too_small(of: Resolve) -> None:
    """What its total cannot hold goes to the CPU."""
    tiny = MachineSnapshot({"ram": pool("ram"), "cuda:0": pool("cuda:0", total=100 * MIB)})
    assert of(gguf(CHAT), tiny).device == "cpu"


def test_auto_leaves_the_gpu_to_builds_that_can_use_it(of: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build is not put on a GPU; asked for it, it says what is wrong."""
    monkeypatch.setattr(resolve, "computes_on_gpu", lambda row, options: False)
    assert of(gguf(CHAT), TWO_GPUS).device == "cpu"
    assert "has no GPU code" in (of(gguf(CHAT), TWO_GPUS, device="cuda:0").problem or "")


def test_auto_puts_only_some_engines_on_a_gpu(of: Resolve) -> None:
    """onnx is put there by asking only."""
    assert of(TEXT_MODEL, TWO_GPUS).device == "cpu"
    assert of(TEXT_MODEL, TWO_GPUS, device="cuda:0").device == "cuda:0"


@pytest.mark.parametrize(("wanted", "machine"), [("gpu", PLAIN), ("cuda:0", PLAIN), ("cuda:5", TWO_GPUS)])
def test_a_gpu_that_is_not_there(of: Resolve, wanted: str, machine: MachineSnapshot) -> None:
    """It is a problem with the wanted device in it, not a silent CPU."""
    assert wanted in (of(gguf(CHAT), machine, device=wanted).problem or "")


def test_a_gpu_build_is_told_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's CUDA backend is in the program, or in a library beside it."""
    program = write(tmp_path / "bin" / "llama-server", b"x" * 10_000)
    row = engines.ENGINES["llama_cpp"]
    monkeypatch.setattr(gpu_build, "find_llama_server", lambda options: program)
    gpu_build._program_has_cuda.cache_clear()
    assert not gpu_build.computes_on_gpu(row, {})
    write(tmp_path / "lib" / "libggml-cuda.so", b"")
    gpu_build._program_has_cuda.cache_clear()
    assert gpu_build.computes_on_gpu(row, {})
    program = write(tmp_path / "static" / "llama-server", b"x" * 5000 + b"ggml_backend_cuda_reg")
    assert gpu_build.computes_on_gpu(row, {})
    assert device.Choice("cpu").problem is None


@pytest.mark.parametrize(("version", "told"), [("2.13.0+cpu", False), ("2.13.0", True), ("2.13.0+cu130", True)])
def test_a_torch_for_cpus_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch, version: str, told: bool) -> None:
    """A build that does not say what it is for is tried; the engine then says what it sees."""
    monkeypatch.setattr(gpu_build, "distribution", lambda name: SimpleNamespace(version=version))
    assert gpu_build.computes_on_gpu(engines.ENGINES["transformers"], {}) is told


# ── what it takes ───────────────────────────────────────────────────────────────────────────


def test_measured_beats_declared_beats_estimated(of: Resolve, peaks: PeakStore) -> None:
    """Rule 2, each with its source; the declared figure stays visible beside the measured one."""
    declared = of(gguf(CHAT), memory="300MiB")
    assert (declared.need.bytes, declared.need.source) == ({"ram": 300 * MIB}, NeedSource.DECLARED)
    peaks.remember(declared.peak_key, "m", {"ram": 200 * MIB})
    measured = of(gguf(CHAT), memory="300MiB")
    assert measured.need.source is NeedSource.MEASURED
    assert measured.need.bytes == {"ram": 210 * MIB}
    assert measured.estimate == declared.need
    assert "200 MiB ram" in measured.need.explanation


def test_a_load_alone_does_not_lower_the_need(of: Resolve, peaks: PeakStore) -> None:
    """Before a model has served, its measured peak is a lower bound only."""
    entry = of(gguf(CHAT), memory="300MiB")
    peaks.remember(entry.peak_key, "m", {"ram": 200 * MIB}, 1.0, in_use=False)
    need = of(gguf(CHAT), memory="300MiB").need
    assert (need.bytes, need.source) == ({"ram": 300 * MIB}, NeedSource.DECLARED), "a guess still, which a use corrects"
    assert need.explanation == "declared 300 MiB; a load alone took 200 MiB ram"
    peaks.remember(entry.peak_key, "m", {"ram": 400 * MIB}, 1.0, in_use=False)
    need = of(gguf(CHAT), memory="300MiB").need
    assert (need.bytes, need.source) == ({"ram": 420 * MIB}, NeedSource.MEASURED)


def test_a_pool_that_was_not_measured_keeps_its_estimate(of: Resolve, peaks: PeakStore) -> None:
    """Without a driver to ask, the GPU's part stays estimated."""
    entry = of(gguf(CHAT), TWO_GPUS, device="cuda:0")
    peaks.remember(entry.peak_key, "m", {"ram": 200 * MIB})
    again = of(gguf(CHAT), TWO_GPUS, device="cuda:0")
    assert again.need.bytes == {"ram": 210 * MIB, "cuda:0": entry.need.bytes["cuda:0"]}


def test_a_declared_need_is_in_the_pool_of_the_device(of: Resolve) -> None:
    """On a GPU the declared figure is the device's, and RAM keeps its estimate."""
    plain = of(gguf(CHAT), TWO_GPUS, device="cuda:0")
    entry = of(gguf(CHAT), TWO_GPUS, device="cuda:0", memory="5GiB")
    assert entry.need.bytes == {"ram": plain.need.bytes["ram"], "cuda:0": 5 * GIB}
    assert of(gguf(CHAT), UNIFIED, device="gpu", memory="5GiB").need.bytes == {"ram": 5 * GIB}


@pytest.mark.parametrize(("used", "reserved"), [(10 * MIB, 18 * MIB), (160 * MIB, 168 * MIB), (1000 * MIB, 1050 * MIB)])
def test_headroom(used: int, reserved: int) -> None:
    """A twentieth, at least 8 MiB."""
    assert with_headroom({"ram": used}) == {"ram": reserved}


CHANGES: list[dict[str, Any]] = [
    {"context": 1024},
    {"parallel": 2},
    {"threads": 2},
    {"cpus": [0, 1, 2]},
    {"options": {"cache_ram": 5}},
    {"env": {"A": "1"}},
    {"device": "cuda:0"},
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_setting_that_changes_memory_changes_the_key(of: Resolve, change: dict[str, Any]) -> None:
    """A peak of other settings is another peak."""
    assert (
        of(gguf(CHAT), TWO_GPUS, device="cpu").peak_key
        != of(gguf(CHAT), TWO_GPUS, **{"device": "cpu"} | change).peak_key
    )


def test_settings_that_do_not_change_memory_keep_the_key(of: Resolve) -> None:
    """Priority, time-outs, a declared need and the order of options do not lose what was learned."""
    key = of(gguf(CHAT), options={"cache_ram": 0, "ubatch": 64}).peak_key
    same = of(
        gguf(CHAT), options={"ubatch": 64, "cache_ram": 0}, priority="high", timeout=3, memory="1GiB", queue=3, pin=True
    )
    assert same.peak_key == key


def test_other_weights_have_another_key(of: Resolve) -> None:
    """The same name with other bytes starts to learn anew."""
    assert of(gguf(CHAT)).peak_key != of(gguf({**CHAT, "general.name": "other"})).peak_key


def test_a_new_engine_version_has_another_key(of: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of the engine may take other memory."""
    before = of(gguf(CHAT)).peak_key
    monkeypatch.setattr(engines, "version", lambda name: "2.0")
    assert of(gguf(CHAT)).peak_key != before


def test_a_commands_key_is_its_line_and_program(
    peaks: PeakStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another argument or a replaced program is another model."""
    program = write(tmp_path / "srv", "1")
    first = command(peaks).peak_key
    monkeypatch.setattr(resolve.shutil, "which", lambda name: str(program))
    second = command(peaks).peak_key
    write(program, "22")
    assert len({first, second, command(peaks).peak_key}) == 3


def test_a_bad_model_has_no_key(of: Resolve) -> None:
    """Nothing is ever remembered for what cannot be read."""
    assert of(b"noise").peak_key == ""
