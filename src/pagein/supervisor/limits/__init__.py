"""Hard limits: each worker in a control group of its own, where this system lets us make one."""

from pagein.supervisor.limits.cell import Cell
from pagein.supervisor.limits.find import Prospect, find_limiter, foresee
from pagein.supervisor.limits.limiter import Groups, Limiter, NoGroups
from pagein.supervisor.limits.margin import LEAST_MARGIN, limit_for
from pagein.supervisor.limits.verdict import outgrown, sacrificed

__all__ = [
    "LEAST_MARGIN",
    "Cell",
    "Groups",
    "Limiter",
    "NoGroups",
    "Prospect",
    "find_limiter",
    "foresee",
    "limit_for",
    "outgrown",
    "sacrificed",
]
