"""What packing costs: perplexity and error of the logits of bf16, 8 and 4 bits against fp32, for one model folder.

    python benchmarks/quality.py MODEL_FOLDER [--text FILE ...] [--memory 2GiB] [--json FILE] [--write [--note TEXT]]

Shards are made in a temporary folder; what is computed are the shards' own bytes, streamed within ``--memory``: that
gives the bits of a full load. Needs pagein[torch], disk for the shards, and memory for the logits of the texts beside:
eight bytes for each token and word of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from common import page, results
from pagein import AutoModel
from pagein.units import parse_bytes
from pagein.weights.packed.quantise import make, prepare
from pagein.weights.reading.checkpoint import open_checkpoint

TEXTS = Path(__file__).parent / "texts"
ROWS = 64
"""Positions that are compared at a time."""


def logits_of(folder: Path, dtype: str, texts: list[torch.Tensor], memory: int) -> list[torch.Tensor]:
    """Return the logits in fp32, [tokens, vocabulary] for each text, of a folder computed in a dtype."""
    longest = max(len(ids) for ids in texts)
    model = AutoModel.from_pretrained(
        folder, memory=memory, dtype=dtype, context=longest, chunk=longest, device="cpu", verbose=False
    )
    try:
        with torch.inference_mode():
            return [model(ids[None]).logits[0].float() for ids in texts]
    finally:
        model.pagein.close()


def perplexity(logits: list[torch.Tensor], texts: list[torch.Tensor]) -> float:
    """Return exp of the mean negative log likelihood of each next token."""
    losses = [
        torch.nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="none")
        for rows, ids in zip(logits, texts, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


def errors(logits: list[torch.Tensor], reference: list[torch.Tensor]) -> dict[str, float]:
    """Compare: largest and root mean square difference of logits, mean KL(reference ‖ other) in nats."""
    largest = squares = divergence = same = 0.0
    count = width = 0
    for text, wanted in zip(logits, reference, strict=True):
        for ours, theirs in zip(text.split(ROWS), wanted.split(ROWS), strict=True):
            log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
            divergence += float((log_p.exp() * (log_p - log_q)).sum())
            largest = max(largest, float((ours - theirs).abs().max()))
            squares += float((ours - theirs).square().sum())
            same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
            count, width = count + len(ours), ours.shape[-1]
    return {
        "max_logit_error": largest,
        "rms_logit_error": (squares / (count * width)) ** 0.5,
        "mean_kl": divergence / count,
        "same_first_token": same / count,
    }


def measure(folder: Path, files: list[Path], memory: int) -> dict[str, dict[str, float]]:
    """Measure every variant on the texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [torch.tensor(tokenizer(file.read_text()).input_ids) for file in files]
    reference = logits_of(folder, "float32", texts, memory)
    tokens = {"tokens": float(sum(len(ids) for ids in texts))}
    rows = {"fp32": {"perplexity": perplexity(reference, texts), "bytes": 4.0 * _parameters(folder)} | tokens}
    logits = logits_of(folder, "bfloat16", texts, memory)
    rows["bf16"] = {"perplexity": perplexity(logits, texts), "bytes": 2.0 * _parameters(folder)}
    rows["bf16"] |= errors(logits, reference)
    for bits in (8, 4):
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            manifest = make(prepare(folder, bits), Path(scratch))
            del logits
            logits = logits_of(Path(scratch), "bfloat16", texts, memory)
        size = sum(float(str(entry["bytes"])) for entry in manifest.shards.values())
        rows[f"{bits} bits"] = {"perplexity": perplexity(logits, texts), "bytes": size} | errors(logits, reference)
    return rows


def write(name: str, measured: dict[str, dict[str, float]], note: str | None = None) -> Path:
    """Put a model's figures into the result file, in the place of what was known of it, beside other models'."""
    file = page.RESULTS / "quality.json"
    before: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"setup": {}, "rows": []}
    rows = [results.Row(**row) for row in before["rows"] if not row["what"].startswith(f"{name}, ")]
    plain = measured["fp32"]
    for kind, row in measured.items():
        told = None if kind == "fp32" else plain["perplexity"]
        rows.append(results.row(f"{name}, {kind}: perplexity", "", row["perplexity"], told, told and "fp32"))
        rows.append(results.row(f"{name}, {kind}: bytes", "MB", row["bytes"] / 1e6))
        if "mean_kl" in row:
            rows.append(results.row(f"{name}, {kind}: largest logit error", "", row["max_logit_error"]))
            rows.append(results.row(f"{name}, {kind}: mean KL", "nats", row["mean_kl"]))
            rows.append(results.row(f"{name}, {kind}: same likeliest token", "%", 100 * row["same_first_token"]))
    setup = before["setup"] | {"torch": torch.__version__, f"tokens of {name}": int(plain["tokens"])}
    if note is not None:
        others = [one for one in str(setup.get("weights", "")).split("; ") if one and not one.startswith(f"{name} ")]
        setup["weights"] = "; ".join([*others, f"{name} {note}"])
    return results.write("quality", setup, rows, results.describe_host())


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
    parser.add_argument("--memory", type=parse_bytes, default=2 * 1024**3, help="of each model (default 2GiB)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="into the result file and its page")
    parser.add_argument("--note", help="where the weights come from, for the result file")
    options = parser.parse_args()
    rows = measure(options.folder, options.text or sorted(TEXTS.glob("*.txt")), options.memory)
    print(f"{'':8}{'MB':>8}{'perplexity':>12}{'max error':>11}{'rms error':>11}{'mean KL':>10}{'same token':>12}")
    for name, row in rows.items():
        line = f"{name:8}{row['bytes'] / 1e6:8.0f}{row['perplexity']:12.3f}"
        if "mean_kl" in row:
            line += f"{row['max_logit_error']:11.3f}{row['rms_logit_error']:11.4f}{row['mean_kl']:10.5f}"
            line += f"{row['same_first_token']:11.1%}"
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.write:
        print(f"written to {write(options.folder.resolve().name, rows, options.note)}")


if __name__ == "__main__":
    main()
