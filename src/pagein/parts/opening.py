"""`load_parts(path)`: an ordinary model whose tasks' weights come when a call needs them, and leave when idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagein.catalog.split.plan import STORED
from pagein.catalog.split.precision import Precisions, check_together, choose
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.parts.building import Build, build_on_meta
from pagein.parts.files.audit import Audit, no_audit
from pagein.parts.files.part_file import Limits, PartReader
from pagein.parts.files.proven import Proven
from pagein.parts.files.signing import Trust
from pagein.parts.guard import Guard, GuardRules
from pagein.parts.plan_facts import kind_of_device, room_for_all
from pagein.parts.rollout import Level
from pagein.parts.runtime import Parts
from pagein.units import parse_bytes


def load_parts(
    path: str | Path,
    memory: str | int | None = None,
    *,
    device: str = "cpu",
    level: str | Level = Level.AUTO,
    precision: Precisions = STORED,
    trust: str | Path | None = None,
    build: Build | None = None,
    wait: float = 30.0,
    rules: GuardRules | None = None,
    limits: Limits | None = None,
    audit: Audit = no_audit,
    sweep_seconds: float | None = 5.0,
) -> Any:
    """Return the model of a split folder: transformers' own class (or what ``build`` makes), in eval mode.

    ``model(..., task=…)`` and ``model.generate(..., task=…)`` bring in what the task needs; ``with model.lease(task):``
    keeps it for longer. Without ``task`` a call inside a lease, or of a model with one task, works as ever.

    ``memory`` (bytes, or text like "4GiB"; default: all parts fit) is for the weights of all parts together.
    ``precision``: one for all parts that have it, one by part, or "auto" (`catalog.split.precision` has its rule).
    ``trust``: a public key (PEM); a split that it did not sign is refused before anything of it is used.
    ``wait``: seconds that a call waits for memory at most. ``sweep_seconds``: how often idle parts are looked for, None
    for never (`Parts.sweep`). Everything else of it is in ``model.pagein``, a `Parts`. Raises PlanRefused, PartRefused,
    PartTooLarge, ModelUnsuited, BadModelFile.
    """
    vouch: Callable[[PartsRoot], Callable[[bytes], None] | None]
    trusted = Trust(trust) if trust is not None else None
    vouch = trusted.vouch if trusted is not None else _no_question
    root = PartsRoot(Path(path))
    try:
        plan = read_plan(root, vouch(root))
        rules = rules or GuardRules()
        wanted = parse_bytes(memory) if isinstance(memory, str) else memory
        forms = choose(plan, precision, kind_of_device(torch.device(device)), wanted)
        check_together(plan, forms)
        model = build_on_meta(plan, root.folder, build)
        if trusted is not None:
            trusted.confirm(root, plan)
        guard = Guard(room_for_all(plan, forms, rules) if wanted is None else wanted, rules)
        proven = Proven() if Proven.available() else None
        reader = PartReader(root, plan, limits=limits, audit=audit, proven=proven)
        parts = Parts(model, root, reader, guard, torch.device(device), forms, precision, wait, audit)
        parts.vouch = vouch(root)
        parts.has_limit = wanted is not None
    except BaseException:
        root.close()
        raise
    try:
        parts.start(Level(level), sweep_seconds)
    except BaseException:
        parts.close()
        raise
    return model


def _no_question(root: PartsRoot) -> None:
    """Where no key is trusted, no plan is asked for a signature."""
