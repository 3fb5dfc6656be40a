"""Events and a time go in, actions with reasons come out. Pure."""

from pagein.scheduler.core import Scheduler
from pagein.scheduler.state import Limits, ModelState, SchedulerState

__all__ = ["Limits", "ModelState", "Scheduler", "SchedulerState"]
