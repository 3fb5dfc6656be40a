"""The language model of the benchmarks: SmolLM2-135M-Instruct as it is, or in 16 bits where the CPU is too old."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.arms import direct
from common.engine import EngineModel
from common.process import ProgramEnded
from common.wire import BenchmarkError
from pagein.units import format_bytes

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

ROOT = Path(__file__).parents[2]
PACKED = ROOT / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = ROOT / ".cache" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Weights:
    """A model file, and what a reader of the result should know of it."""

    path: Path
    told: str


def choose_weights(program: str) -> Weights:
    """The packed weights where this llama-server runs them; else the same ones in 16 bits, and why."""
    if not PACKED.is_file():
        raise BenchmarkError(f"{PACKED} is missing: run `scripts/setup bench`")
    why = _why_not(program, PACKED)
    if why is None:
        return Weights(PACKED, f"{PACKED.name}, {format_bytes(PACKED.stat().st_size)}")
    wide = CACHE / "SmolLM2-135M-Instruct.F16.gguf"
    if not wide.is_file():
        widen(PACKED, wide)
    if (also := _why_not(program, wide)) is not None:
        raise BenchmarkError(f"{program} cannot run here: {also}")
    size = format_bytes(wide.stat().st_size)
    told = f"{wide.name}, {size} ({PACKED.name} widened to 16 bits: with the 4-bit file this llama-server {why} here)"
    return Weights(wide, told)


def _why_not(program: str, path: Path) -> str | None:
    """Start a llama-server on a file; returns why it ended, or None when it became ready (its warm-up has run then)."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(direct(program, EngineModel("probe", path, 256), Path(folder)))
        except ProgramEnded as ended:
            if ended.returncode != -signal.SIGILL:
                raise
            return "ends with SIGILL"
    return None


def widen(source: Path, target: Path) -> None:
    """Write a GGUF file's weights in 16 bits."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    _copy_facts(reader, writer)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        wide = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        writer.add_tensor(tensor.name, wide if tensor.tensor_type == GGMLQuantizationType.F32 else wide.astype("f2"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


def _copy_facts(reader: GGUFReader, writer: GGUFWriter) -> None:
    from gguf import GGUFValueType, LlamaFileType

    for fact in reader.fields.values():
        if fact.name.startswith("GGUF.") or fact.name == "general.architecture":
            continue  # the writer makes these itself
        value = LlamaFileType.MOSTLY_F16 if fact.name == "general.file_type" else fact.contents()
        kind = fact.types[0]
        writer.add_key_value(fact.name, value, kind, fact.types[-1] if kind == GGUFValueType.ARRAY else None)


def two_copies(weights: Path, folder: Path) -> tuple[Path, Path]:
    """The same weights twice, as two models: copies, since links would share their pages in memory."""
    names = folder / f"a-{weights.name}", folder / f"b-{weights.name}"
    for name in names:
        shutil.copyfile(weights, name)
    return names
