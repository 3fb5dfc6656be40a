"""The engine table as data, and that it says what the engines themselves say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pagein.catalog import engines, estimate_llama, estimate_local
from pagein.catalog.engines import BY_FORMAT, ENGINES, find_llama_server, find_row, installed_version, program_version
from pagein.catalog.model import Format
from tests.catalog.build import write


def test_every_format_has_an_engine() -> None:
    """A file alone tells what computes it; each row takes the formats that lead to it."""
    assert set(BY_FORMAT) == set(Format)
    for kind, name in BY_FORMAT.items():
        if name in ENGINES:
            assert kind in ENGINES[name].formats


def test_unknown_engines_have_no_row() -> None:
    """What is neither in the table nor registered is unknown."""
    assert find_row("nonesuch") is None
    assert "llama_cpp" in engines.known_engines()


def test_a_registered_engine_of_another_package_gets_a_generic_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is not loaded: its package's name is enough."""

    @dataclass(frozen=True)
    class Package:
        name: str = "pytest"

    @dataclass(frozen=True)
    class Entry:
        name: str
        dist: Package

    monkeypatch.setattr(engines, "entry_points", lambda group, name=None: [Entry("theirs", Package())])
    row = find_row("theirs")
    assert row is not None
    assert row.formats == frozenset(Format)
    assert (installed_version(row) or "").startswith("pytest ")
    assert "theirs" in engines.known_engines()


def test_a_version_needs_every_package() -> None:
    """Of each group of packages one must be there; the first that is names the version."""
    row = engines.EngineRow("x", frozenset(), frozenset(), 0, (("nonesuch", "pytest"), ("pydantic",)), None)
    version = installed_version(row)
    assert version is not None
    assert version.split()[::2] == ["pytest", "pydantic"]
    gone = engines.EngineRow("x", frozenset(), frozenset(), 0, (("pytest",), ("nonesuch",)), None)
    assert installed_version(gone) is None


def test_the_llama_server_that_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option's program, else the one on the PATH, else the library; `builtin` means the library."""
    program = write(tmp_path / "llama-server", "#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert find_llama_server({}) is None
    assert find_llama_server({"server": str(program)}) == program
    assert find_llama_server({"server": "nonesuch"}) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_llama_server({}) == program
    assert find_llama_server({"server": "builtin"}) is None


def test_a_replaced_program_has_another_version(tmp_path: Path) -> None:
    """Size and time tell one build from the next; a program that is gone does not disturb."""
    program = write(tmp_path / "llama-server", "1")
    first = program_version(program)
    write(program, "22")
    assert program_version(program) != first
    program.unlink()
    assert "unknown" in program_version(program)


def test_repacked_types_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """ARM repacks more types than x86; a program built for AMX repacks more than the library."""
    for machine, program, amx, has in (
        ("x86_64", False, True, False),
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),
        ("aarch64", False, False, True),
    ):
        engines.repacked_types.cache_clear()
        monkeypatch.setattr(engines.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(engines, "_has_amx", lambda amx=amx: amx)
        assert ("q8_0" in engines.repacked_types(program)) is has
    engines.repacked_types.cache_clear()


def test_llama_defaults_are_those_of_the_engine() -> None:
    """Estimate and engine count the same buffers."""
    from pagein.engines import llama_settings
    from pagein.engines.llama_cpp import BUILT_IN
    from pagein.protocol import WorkerSpec

    options = llama_settings.LlamaOptions()
    assert options.checkpoints == estimate_llama.DEFAULT_CHECKPOINTS
    assert options.cache_ram == 0
    assert BUILT_IN == engines.BUILT_IN_SERVER
    for device, ubatch in (("cpu", estimate_llama.DEFAULT_UBATCH), ("cuda:0", estimate_llama.DEFAULT_GPU_UBATCH)):
        spec = WorkerSpec("m", "llama_cpp", "t", "/tmp", path=__file__, context=4096, device=device)
        assert llama_settings.resolve(spec).ubatch == ubatch


@pytest.mark.engines
def test_local_defaults_are_those_of_the_engines() -> None:
    """Batches and lengths that scratch grows with have one value."""
    from pagein.engines.recipes.embedding import Embedding
    from pagein.engines.recipes.sparse_rerank import SparseRerank
    from pagein.engines.whisper import WhisperOptions

    assert Embedding().batch_tokens == estimate_local.BATCH_TOKENS["embedding"]
    assert SparseRerank().batch_tokens == estimate_local.BATCH_TOKENS["sparse_rerank"]
    assert WhisperOptions().max_seconds == estimate_local.WHISPER_SECONDS
