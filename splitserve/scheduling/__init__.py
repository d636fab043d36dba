"""The scheduler: which worker, which plan, when. Decides, never does."""

from splitserve.scheduling.desk import SchedulerLimits
from splitserve.scheduling.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerLimits"]
