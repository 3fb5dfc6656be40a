"""What `test_limited.py` runs in a memory group: generates greedily within a budget and prints what it saw, as JSON."""

from __future__ import annotations

import json
import os
import sys

import psutil

SPARE = 8 * 1024**2
"""Bytes above the least plan, where no budget is given."""


def least(folder: str, tokens: int) -> int:
    """Return the bytes of the least plan, as a refusal tells them."""
    from pagein import AutoModel
    from pagein.errors import DoesNotFit

    try:
        AutoModel.from_pretrained(folder, memory=1, context=tokens + 8, verbose=False)
    except DoesNotFit as error:
        return int(str(error.details["need_bytes"]))
    raise AssertionError("a byte was enough")


def main() -> None:
    group, folder, memory, tokens = sys.argv[1:5]
    with open(os.path.join(group, "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
    import torch
    import transformers

    from pagein import AutoModel

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    budget = int(memory) or least(folder, int(tokens)) + SPARE
    model = AutoModel.from_pretrained(folder, memory=budget, context=int(tokens) + 8, verbose=False)
    resident: list[int] = []
    model.register_forward_hook(lambda *_: resident.append(psutil.Process().memory_info().rss))
    ids = torch.arange(2, 10)[None]
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=int(tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
    plan = model.pagein.plan
    told = {"tokens": out[0].tolist(), "resident": resident, "fits": plan.fits_whole, "kv": plan.kv}
    model.pagein.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
