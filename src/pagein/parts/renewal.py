"""How a model's parts change while calls run: one takes another's place, and what was written since joins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagein.catalog.split.precision import check_together, extend
from pagein.catalog.split.root import read_plan
from pagein.errors import PartRefused, PartsBusy
from pagein.parts.adapting import make_adaptable
from pagein.parts.files.check import verify
from pagein.parts.groups import groups_of, set_rivals
from pagein.parts.plan_facts import adapted_modules, chain_of, room_for_all
from pagein.parts.rollout import Level

if TYPE_CHECKING:
    from pagein.parts.runtime import Parts


def replace(parts: Parts, part: str, by: str, who: str) -> None:
    """Let a part stand in another's place (`Parts.replace`); raises PartRefused, and the old one serves on."""
    home, plan = parts.residency, parts.plan
    old, new = plan.part(part), plan.part(by)
    if old.name not in chain_of(plan, new):
        raise PartRefused(new.name, f"does not stand in the place of the part {old.name!r}")
    group = home.groups[new.name]
    verify(parts.root, group.entry)
    before = home.replace(old.name, new.name)
    if before == new.name or not home.guard.is_resident(before):
        return
    try:
        home.release(home.acquire([old.name], None, who, parts.wait, by_hand=True))
    except PartsBusy:
        return  # a call with the old one goes on; the first call after it brings the new one in
    if home.standing.get(old.name) != new.name:
        raise group.retold()
    home.unload(before)


def refresh(parts: Parts) -> None:
    """Read the plan again, and let what is new join (`Parts.refresh`); raises PlanRefused, and nothing is changed."""
    home = parts.residency
    known = home.groups
    plan = read_plan(parts.root, parts.vouch)
    for name, part in plan.parts.items():
        if name in known and part.file(known[name].precision).sha256 != known[name].entry.sha256:
            raise PartRefused(name, "has another content now; a part that changes needs a name of its own")
    forms = extend(plan, {name: group.precision for name, group in known.items()}, parts.precision)
    check_together(plan, forms)
    every = groups_of(plan.parts.values(), parts.seats, home.lock, forms)
    fresh = {name: one for name, one in every.items() if name not in known}
    with home.lock:
        make_adaptable(parts.model, adapted_modules(plan), parts.owner)
        for name, group in known.items():
            group.part = plan.parts.get(name, group.part)
        # Another refresh may have been faster: what it brought in stays.
        known.update({name: one for name, one in fresh.items() if name not in known})
        set_rivals(known.values(), parts.seats)
        home.reader.plan, parts.digest = plan, plan.digest
        if not parts.has_limit:
            home.guard.set_allowance(room_for_all(plan, forms, home.guard.rules))
    if parts.level is Level.OFF:
        parts.set_level(Level.OFF)
