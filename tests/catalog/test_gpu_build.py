"""What the installed build of torch takes of a process, told from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.catalog import estimate_transformers
from pagein.catalog.gpu_build import TORCH_FOR_GPUS, torch_for_gpus
from pagein.weights.planning.needs import RUNTIME, read_needs
from pagein.weights.reading.checkpoint import open_checkpoint
from tests.weights.headers import LLAMA, llama, write_folder


@pytest.mark.parametrize(
    ("version", "library", "more"),
    [
        ("2.14.1", "libtorch_cuda.so", TORCH_FOR_GPUS),
        ("2.14.1+rocm7.1", "libtorch_hip.so", TORCH_FOR_GPUS),
        ("2.14.1", "libtorch_cpu.dylib", 0),
        ("2.14.1+cpu", "libtorch_cpu.so", 0),
    ],
)
def test_a_torch_for_gpus_takes_more_of_a_process_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, library: str, more: int
) -> None:
    """PyPI's build for Linux is one: its figure is in what the fleet grants and in what `pagein plan` weighs."""
    site = tmp_path / "site"
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "torch" / "lib" / library).touch()
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(site))
    assert torch_for_gpus() == more
    assert estimate_transformers.process("cpu").bytes == estimate_transformers.RUNTIME + more
    assert estimate_transformers.process("cuda:0").bytes == estimate_transformers.CUDA_DEVICE
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", llama(), LLAMA))
    assert read_needs(checkpoint, context=100).needs.runtime == RUNTIME + more
