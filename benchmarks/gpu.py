"""`make bench-gpu`: whether streaming to a CUDA device changes nothing, and what a token costs there.

Small random models of several kinds, dtypes and precisions are compared with full loads on the device, bit for bit.
Then one of 3.55 GB runs in 2 GiB of the device: a token beside the longest of reading, copying and computing, its bytes
beside the plan's, and beside AirLLM and accelerate's disk offload in the same bytes. Between the two, twenty
conversations whose KV takes five times what it may on the device: in pinned memory, on the disk, and in both, beside
transformers' own caches. Under ten minutes, 20 GB of disk; as root each arm's host memory is limited, too. `--only kv`
runs that part alone. Without a CUDA device it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import results
from common.process import end_on_sigterm
from common.wire import BenchmarkError
from pagein import __version__
from pagein.units import format_bytes
from weights_models import Models, make

ROOT = Path(__file__).parents[1]
MINUTES = 9.0
KV_SHARE = 0.4
"""Of these, until which the KV's part begins its arms."""


def main() -> int:
    """Run, print and write."""
    told = read_arguments()
    begin = time.monotonic()
    if (why := why_not()) is not None:
        print(f"bench-gpu: {why}; nothing is measured and nothing is written")
        return 0
    import torch
    import transformers

    from gpu_checks import exact, pace, tiers

    end_on_sigterm()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    host, device = results.describe_host(), "cuda:0"
    if told.only == "kv":
        found = tiers.measure(told.folder / "kv", device, begin + 60 * told.minutes)
        results.show("KV in tiers on a CUDA device", list(tiers.rows_of(found)))
        print("\na part of the benchmark: nothing is written")
        return 0
    compared = exact.compare_all(told.folder / "small", device)
    torch.cuda.empty_cache()
    for one in compared:
        print(f"{one.name}, head {one.head}: logits {one.same_logits}, tokens {one.same_tokens}, {one.farthest:.2g}")
    conversations = tiers.measure(told.folder / "kv", device, begin + 60 * told.minutes * KV_SHARE)
    torch.cuda.empty_cache()
    models = Models(told.folder)
    make(models, ("hf",))
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as logs:
        paced = pace.measure(models, told.folder / "arms", Path(logs), device, begin + 60 * told.minutes)
    rows = [*exact.rows_of(compared), *tiers.rows_of(conversations), *pace.rows_of(paced)]
    results.show("On a CUDA device", rows)
    unlike = [f"{one.name}, head {one.head}" for one in compared if not (one.same_logits and one.same_tokens)]
    parts = {**pace.setup_of(paced), **tiers.setup_of(conversations)}
    setup = {**setup_of(models), **parts, "compared": len(compared), "unlike": unlike}
    print(f"\nwritten to {results.write('gpu', setup, rows, host)}")
    return 0


def why_not() -> str | None:
    """Why nothing can be measured here; None where it can."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / ".cache" / "benchmarks" / "gpu"
    parser.add_argument("--folder", type=Path, default=folder, help="where models and copies go (default: %(default)s)")
    parser.add_argument("--only", choices=["kv"], help="a part of it; then nothing is written")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="arms begin and end within (%(default)s)")
    return parser.parse_args()


def setup_of(models: Models) -> dict[str, Any]:
    """What it was measured with."""
    import torch

    card = torch.cuda.get_device_properties(0)
    size = sum(file.stat().st_size for file in models.files("hf")) / 1e9
    return {
        "pagein": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "device": f"{card.name}, {format_bytes(card.total_memory)}, CUDA {torch.version.cuda}",
        "weights": f"Qwen2 of {models.blocks} blocks, random, {size:.2f} GB in bfloat16",
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        sys.exit(1)
