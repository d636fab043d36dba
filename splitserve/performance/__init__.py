"""Latency models: what a worker will need for a prompt, a step, a transfer."""
