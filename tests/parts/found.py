"""An analysis as the analyser would find it, made by hand."""

from __future__ import annotations

from dataclasses import replace

from pagein.parts.splitting.analysis import Analysis, Origin, Sharing, TaskFacts
from pagein.parts.splitting.rules import Influence, TensorUse, assign
from pagein.parts.splitting.usage import groups

MIB = 1024**2
SHA = "ab" * 32


def influence() -> Influence:
    """Two tasks with a head each over one backbone, and a layer that one of them uses in half of its samples."""
    both = {"sum": 2, "tag": 1}
    tensors = {
        "body.0.weight": TensorUse(40 * MIB, both),
        "body.1.weight": TensorUse(40 * MIB, both),
        "gate.weight": TensorUse(MIB, {"sum": 1}),
        "heads.sum.weight": TensorUse(20 * MIB, {"sum": 2}),
        "heads.tag.weight": TensorUse(10 * MIB, {"tag": 1}),
        "idle.weight": TensorUse(2 * MIB),
    }
    return Influence({"sum": 2, "tag": 1}, tensors)


def analysis(models: int = 1, adapters: int = 0, **sharing: object) -> Analysis:
    """What `influence` gives, of so many models and adapters of 1 MiB."""
    found = influence()
    origins = {f"m{at}": Origin(f"folder{at}", "SmallModel", {"model.safetensors": SHA}) for at in range(models)}
    parts = [f"sum{at}.adapter" for at in range(adapters)]
    facts = TaskFacts("generate", "m0", None, parts[0] if parts else None, 2, 4, 101 * MIB, 1, 3, {"heads.sum": (1, 1)})
    tasks = {"sum": facts, "tag": replace(facts, kind="tokens", adapter=None, samples=1, heads={})}
    return Analysis(
        origins,
        {part: Origin(part, "LORA", {"adapter_model.safetensors": SHA}) for part in parts},
        dict.fromkeys(parts, MIB),
        tasks,
        assign(found),
        {"rotary.inv_freq": "computed by Rotary as it is made"},
        replace(Sharing(0, 0, 0), **sharing),
        groups(found),
        {"pagein": "0", "proof": "bit-identical"},
    )
