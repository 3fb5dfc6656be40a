"""What packing costs: perplexity and error of the logits of bf16, 8 and 4 bits against fp32, for one model folder.

    python benchmarks/quality.py MODEL_FOLDER [--text FILE ...] [--json FILE]

Shards are made in a temporary folder; the models computed from are the shards' own
bytes, read back from the disk. Needs pagein[torch] and about eight times the model's parameters in bytes of memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers

from pagein.weights.checkpoint import open_checkpoint
from pagein.weights.making import swap_packed
from pagein.weights.original import Safetensors, read_source
from pagein.weights.quantise import make, prepare
from pagein.weights.shards import open_shards, read_manifest
from pagein.weights.sources import find_sources
from pagein.weights.structure import build

TEXTS = Path(__file__).parent / "texts"


def load(folder: Path, dtype: str) -> torch.nn.Module:
    """Load a model folder, or a folder of shards, with every tensor resident."""
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint, dtype).model
    if (folder / "manifest.json").is_file():
        open_shards(folder)
        swap_packed(model, read_manifest(folder))
    original = Safetensors(folder)
    for name, source in find_sources(model, checkpoint).items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        value = read_source(original, source, 0, source.nbytes)
        if leaf in module._buffers:
            module._buffers[leaf] = value.view(module._buffers[leaf].shape)
        else:
            old = module._parameters[leaf]
            value = value.to(old.dtype).view(old.shape)
            module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    original.close()
    return model


@torch.inference_mode()
def logits_of(model: torch.nn.Module, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits in fp32, [tokens, vocabulary] for each text."""
    return [model(ids[None]).logits[0].float() for ids in texts]


def perplexity(logits: list[torch.Tensor], texts: list[torch.Tensor]) -> float:
    """Return exp of the mean negative log likelihood of each next token."""
    losses = [
        torch.nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="none")
        for rows, ids in zip(logits, texts, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


def errors(logits: list[torch.Tensor], reference: list[torch.Tensor]) -> dict[str, float]:
    """Compare: largest and root mean square difference of logits, mean KL(reference ‖ other) in nats."""
    ours, theirs = torch.cat(logits), torch.cat(reference)
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return {
        "max_logit_error": float((ours - theirs).abs().max()),
        "rms_logit_error": float((ours - theirs).square().mean().sqrt()),
        "mean_kl": float(divergence.mean()),
        "same_first_token": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def measure(folder: Path, files: list[Path]) -> dict[str, dict[str, float]]:
    """Measure every variant on the texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [torch.tensor(tokenizer(file.read_text()).input_ids) for file in files]
    reference = logits_of(load(folder, "float32"), texts)
    rows = {"fp32": {"perplexity": perplexity(reference, texts), "bytes": float(4 * _parameters(folder))}}
    logits = logits_of(load(folder, "bfloat16"), texts)
    rows["bf16"] = {"perplexity": perplexity(logits, texts), "bytes": float(2 * _parameters(folder))}
    rows["bf16"] |= errors(logits, reference)
    for bits in (8, 4):
        with tempfile.TemporaryDirectory() as scratch:
            manifest = make(prepare(folder, bits), Path(scratch))
            logits = logits_of(load(Path(scratch), "bfloat16"), texts)
        size = sum(float(str(entry["bytes"])) for entry in manifest.shards.values())
        rows[f"{bits} bits"] = {"perplexity": perplexity(logits, texts), "bytes": size} | errors(logits, reference)
    return rows


def _parameters(folder: Path) -> int:
    total = 0
    for tensor in open_checkpoint(folder).tensors.values():
        count = 1
        for side in tensor.shape:
            count *= side
        total += count
    return total


def main() -> None:
    """Print a table; with ``--json`` write the figures too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.folder, options.text or sorted(TEXTS.glob("*.txt")))
    print(f"{'':8}{'MB':>8}{'perplexity':>12}{'max error':>11}{'rms error':>11}{'mean KL':>10}{'same token':>12}")
    for name, row in rows.items():
        line = f"{name:8}{row['bytes'] / 1e6:8.0f}{row['perplexity']:12.3f}"
        if "mean_kl" in row:
            line += f"{row['max_logit_error']:11.3f}{row['rms_logit_error']:11.4f}{row['mean_kl']:10.5f}"
            line += f"{row['same_first_token']:11.1%}"
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
