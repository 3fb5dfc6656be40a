"""Make a Hugging Face folder (config, tokenizer, bfloat16 safetensors) from a GGUF file.

    python scripts/make_hf_folder.py GGUF OUT

Needs torch, transformers and gguf. The folder appears whole or not at all; one that was made from the same file before
is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine
STAMP = ".made.json"
DIGITS_APART = ("smollm",)
"""Pre-tokenizers (`tokenizer.ggml.pre`) that split numbers into digits, which transformers' conversion drops."""


Convert = Callable[[Path, Path], None]
"""Makes a folder, the second path, from a file."""


def make_hf_folder(source: Path, folder: Path) -> bool:
    """Convert a GGUF file to a folder that transformers loads; returns False where it was there already."""
    return make_folder(source, folder, _convert, Path(__file__))


def make_folder(source: Path, folder: Path, convert: Convert, *by: Path) -> bool:
    """Let ``convert`` make a folder from a file, whole or not at all; False where the code in ``by`` had made it."""
    made_from = {"sha256": _digest(source), "by": " ".join(_digest(path) for path in by)}
    if _is_made(folder, made_from):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*"):  # by a run that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / folder.name
        convert(source, fresh)
        sizes = {path.name: path.stat().st_size for path in fresh.iterdir()}
        (fresh / STAMP).write_text(json.dumps(made_from | {"sizes": sizes}, indent=1) + "\n")
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
    return True


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if _pre_tokenizer_of(source) in DIGITS_APART:
        _split_digits(tokenizer)
    # float32 first: rounding once, at the end, is what a dequantised file means
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain now, and save_pretrained must not say otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pre_tokenizer_of(source: Path) -> str | None:
    from gguf import GGUFReader

    found = GGUFReader(source).fields.get("tokenizer.ggml.pre")
    return None if found is None else str(found.contents())


def _split_digits(tokenizer: Any) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [
            Digits(individual_digits=True),
            ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _is_made(folder: Path, made_from: dict[str, str]) -> bool:
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes = stamp.pop("sizes")
        there = {name: (folder / name).stat().st_size for name in sizes}
    except (OSError, ValueError, KeyError):
        return False
    return bool(stamp == made_from and there == sizes)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="GGUF")
    parser.add_argument("folder", type=Path, metavar="OUT")
    told = parser.parse_args()
    made = make_hf_folder(told.source.resolve(), told.folder.absolute())
    print(f"{told.folder}: {'made from ' + told.source.name if made else 'ready'}")


if __name__ == "__main__":
    main()
