"""Open-loop load, scenarios and comparisons, as code."""
