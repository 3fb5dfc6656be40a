"""What squeezed KV costs: `python -m kv_arms.lossy MODEL TEXT…`.

The first half of a text is computed, its KV squeezed and restored as the lower tiers do it, block by block; then the
second half is computed behind it. Compared with the same behind the KV as it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import torch
import transformers

from kv_arms.say import say
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.tiers.settings import Compression
from pagein.kv.tiers.squeeze import error_of, squeeze, unsqueeze
from pagein.kv.trial.run import open_model
from quality import errors, perplexity


@torch.inference_mode()
def main() -> None:
    """Measure every kind on all texts and say their figures."""
    folder, *files = map(Path, sys.argv[1:])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = open_model(folder, "cpu", "auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [torch.tensor(tokenizer(file.read_text()).input_ids) for file in files]
    halves = [ids[len(ids) // 2 // BLOCK * BLOCK :] for ids in texts]
    reference = [_behind(model, ids, None)[0] for ids in texts]
    found: dict[str, dict[str, float]] = {"exact": {"perplexity": perplexity(reference, halves)}}
    for kind in get_args(Compression):
        runs = [_behind(model, ids, kind) for ids in texts]
        logits = [run[0] for run in runs]
        numbers = {"perplexity": perplexity(logits, halves), **errors(logits, reference)}
        found[kind] = numbers | {"relative_rms": max(run[1] for run in runs), "share": runs[0][2]}
    say("ran", kinds=found, tokens=sum(len(ids) for ids in halves), behind=sum(map(len, texts)) - sum(map(len, halves)))


def _behind(model: Any, ids: torch.Tensor, kind: Compression | None) -> tuple[torch.Tensor, float, float]:
    """Logits in fp32 of the second half, [tokens, vocabulary]; largest relative error of any layer; share of bytes."""
    count = len(ids) // 2 // BLOCK * BLOCK
    cache = transformers.DynamicCache(config=model.config)
    model(ids[None, :count], past_key_values=cache, use_cache=True, logits_to_keep=1)
    worst, share = 0.0, 1.0
    for layer in cache.layers if kind is not None else ():
        for numbers in (layer.keys, layer.values):
            error = error_of(numbers, kind)
            worst, share = max(worst, error.relative_rms), error.share
            for start in range(0, count, BLOCK):
                block = numbers[0, :, start : start + BLOCK]
                block.copy_(unsqueeze(squeeze(block, kind), block.shape, block.dtype, kind))
    logits = model(ids[None, count:], past_key_values=cache, use_cache=True).logits[0].float()
    return logits, worst, share


if __name__ == "__main__":
    main()
