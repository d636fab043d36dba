"""The engine loop: continuous batching with chunked prefill over a paged KV cache."""
