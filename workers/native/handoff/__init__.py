"""Hand-off: a decode worker pulls KV straight from the prefill worker while prefill still runs."""
