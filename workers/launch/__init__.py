"""Starts and supervises workers on this machine."""

from workers.launch.fleet import Fleet
from workers.launch.local_process import LaunchSpec, LocalProcess

__all__ = ["Fleet", "LaunchSpec", "LocalProcess"]
