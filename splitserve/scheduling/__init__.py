"""The scheduler: which worker, which plan, when. Decides, never does."""

from splitserve.scheduling.scheduler import Scheduler, SchedulerLimits

__all__ = ["Scheduler", "SchedulerLimits"]
