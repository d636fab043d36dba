"""What runs beside a model: one process, one role."""
