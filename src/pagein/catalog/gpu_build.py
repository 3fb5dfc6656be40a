"""Whether an engine's installed build can compute on an NVIDIA GPU, told without starting it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pagein.catalog.engines import EngineRow, find_llama_server, is_installed

_MARK = b"ggml_backend_cuda"
"""Stands in every program or library that llama.cpp's CUDA backend is linked into, and in no other."""
LARGEST_SEARCHED = 4 * 1024**3
_LIBRARY_FOLDERS = (".", "../lib", "../lib64")
_TORCH_LIBRARIES = ("*torch_cuda*", "*torch_hip*", "*torch_xpu*")
TORCH_FOR_GPUS = 384 * 1024**2
"""Bytes of a process that a torch for GPUs takes beyond one for CPUs, without a GPU too: its libraries are linked at
start. 367 MiB with torch 2.14.1 for CUDA 13, as PyPI has it for Linux, beside 2.13 for CPUs."""


def computes_on_gpu(row: EngineRow, options: Mapping[str, object]) -> bool:
    """Tell whether the installed build of an engine has GPU code; True where it cannot be told."""
    if row.name == "llama_cpp":
        program = find_llama_server(options)
        return _program_has_cuda(program) if program is not None else _library_has_cuda()
    if row.name == "onnx":
        return is_installed("onnxruntime-gpu")
    if row.name in ("transformers", "parts"):
        return not _torch_is_for_cpus()
    return True


def torch_for_gpus() -> int:
    """Bytes that the installed torch takes of each process for GPUs, also of one that computes on the CPU."""
    try:
        folder = Path(str(distribution("torch").locate_file("torch/lib")))
    except PackageNotFoundError:
        return 0
    return TORCH_FOR_GPUS if any(any(folder.glob(name)) for name in _TORCH_LIBRARIES) else 0


def _torch_is_for_cpus() -> bool:
    """By the version's suffix; of a build without one it cannot be told."""
    try:
        return distribution("torch").version.endswith("+cpu")
    except PackageNotFoundError:
        return True


@lru_cache(maxsize=16)
def _program_has_cuda(program: Path) -> bool:
    """A llama-server has the backend inside, or finds it in a library beside it."""
    for folder in _LIBRARY_FOLDERS:
        if any((program.parent / folder).glob("libggml-cuda*")):
            return True
    return _contains(program, _MARK)


@lru_cache(maxsize=1)
def _library_has_cuda() -> bool:
    try:
        files = distribution("xllamacpp").files or []
    except PackageNotFoundError:
        return False
    return any(_contains(Path(str(file.locate())), _MARK) for file in files if file.suffix in (".so", ".dylib"))


def _contains(path: Path, mark: bytes) -> bool:
    """Search a file once through a mapping: its pages are cache, not memory of this process."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return len(view) <= LARGEST_SEARCHED and view.find(mark) >= 0
    except (OSError, ValueError):
        return False
