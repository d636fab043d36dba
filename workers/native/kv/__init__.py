"""Paged KV cache: memory, block bookkeeping with prefix reuse, and attention over pages."""
