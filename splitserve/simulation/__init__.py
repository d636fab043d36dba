"""A virtual clock, engines, links and clients that drive the very same Scheduler."""
