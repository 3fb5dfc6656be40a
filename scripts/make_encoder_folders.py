"""Make Hugging Face folders of the example encoders: what they were before they were exported to other formats.

    python scripts/make_encoder_folders.py [--models models] [NAME ...]

Reads what `examples/five_models/prepare.py` made. MiniLM and DINOv2 come out of ONNX files, Whisper out of a
CTranslate2 file; all are written in float32. Needs torch, transformers and onnx. A folder appears whole or not at all;
one that was made from the same file before is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from from_ctranslate2 import read_variables, whisper_weights
from from_onnx import read_onnx
from make_hf_folder import Convert, make_folder

HERE = Path(__file__).resolve().parent
Arrays = dict[str, np.ndarray]


def minilm(source: Path, folder: Path) -> None:
    """all-MiniLM-L6-v2. The export has no pooler: the mean of the tokens' vectors stands for a text."""
    from transformers import BertConfig, PreTrainedTokenizerFast

    config = BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        architectures=["BertModel"],
    )
    _write(folder, config, read_onnx(source, "inner."), away=("pooler.dense.weight", "pooler.dense.bias"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source.parent / "tokenizer.json"), model_max_length=512, **named
    )
    tokenizer.save_pretrained(folder)


def dinov2(source: Path, folder: Path) -> None:
    """The backbone of DINOv2-S/14; the saliency head that the file has over it is left out."""
    from transformers import Dinov2Config

    config = Dinov2Config(
        hidden_size=384,
        num_attention_heads=6,
        image_size=518,
        use_mask_token=False,
        architectures=["Dinov2Model"],
    )
    positions = [one for name, one in read_onnx(source, "onnx::").items() if not name.startswith("MatMul")]
    joined = {"embeddings.position_embeddings": np.concatenate(positions, axis=1)}  # the export has the first apart
    _write(folder, config, read_onnx(source, "backbone.") | joined)


def whisper(source: Path, folder: Path) -> None:
    """Whisper tiny.en, with what its speech is to be made into and which tokens it must not write."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast, WhisperConfig, WhisperFeatureExtractor

    told = json.loads((source.parent / "config.json").read_text())
    config = WhisperConfig(
        vocab_size=51864,
        decoder_start_token_id=50257,
        architectures=["WhisperForConditionalGeneration"],
    )
    _write(folder, config, whisper_weights(read_variables(source)), away=("proj_out.weight",))
    GenerationConfig(
        decoder_start_token_id=50257,
        bos_token_id=50256,
        eos_token_id=50256,
        pad_token_id=50256,
        no_timestamps_token_id=50362,
        is_multilingual=False,
        return_timestamps=False,
        max_length=448,
        suppress_tokens=told["suppress_ids"],
        begin_suppress_tokens=told["suppress_ids_begin"],
        alignment_heads=told["alignment_heads"],
    ).save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(
        tokenizer_file=str(source.parent / "tokenizer.json"), bos_token=end, eos_token=end, unk_token=end, pad_token=end
    ).save_pretrained(folder)


@dataclass(frozen=True)
class Encoder:
    """One folder to be made."""

    source: str
    """Of ``models``."""
    convert: Convert
    by: tuple[str, ...]


ENCODERS = {
    "minilm-hf": Encoder("minilm/model.onnx", minilm, ("from_onnx.py",)),
    "dinov2-s-hf": Encoder("vit-focus/model.onnx", dinov2, ("from_onnx.py",)),
    "whisper-tiny-en-hf": Encoder("whisper-tiny-en/model.bin", whisper, ("from_ctranslate2.py",)),
}


def make_encoder_folder(name: str, models: Path) -> bool:
    """Make one of `ENCODERS`; returns False where it was there already."""
    encoder = ENCODERS[name]
    by = (Path(__file__), *(HERE / one for one in encoder.by))
    return make_folder(models / encoder.source, models / name, encoder.convert, *by)


def _write(folder: Path, config: Any, weights: Arrays, away: tuple[str, ...] = ()) -> None:
    """Write configuration and weights, and let transformers load them: all it needs but ``away``, and nothing else."""
    import transformers
    from safetensors.numpy import save_file

    transformers.logging.set_verbosity_error()  # what is away is told below
    transformers.logging.disable_progress_bar()
    folder.mkdir()
    config.dtype = "float32"
    config.save_pretrained(folder)
    save_file(
        {name: np.ascontiguousarray(one) for name, one in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    kind = getattr(transformers, config.architectures[0])
    _, told = kind.from_pretrained(folder, output_loading_info=True)
    missing, unknown = set(told["missing_keys"]) - set(away), set(told["unexpected_keys"])
    if missing or unknown or told["mismatched_keys"]:
        raise SystemExit(
            f"{folder.name}: missing {missing}, unknown {unknown}, of other shape {told['mismatched_keys']}"
        )


def main() -> None:
    """Make those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="default: models")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENCODERS)}; default: all")
    told = parser.parse_args()
    if unknown := sorted(set(told.names) - set(ENCODERS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ENCODERS)}")
    for name in told.names or ENCODERS:
        made = make_encoder_folder(name, told.models.absolute())
        print(f"{name}: {'made from ' + ENCODERS[name].source if made else 'ready'}")


if __name__ == "__main__":
    main()
