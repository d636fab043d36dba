"""The HTTP edge of splitserve: one process between OpenAI clients and inference workers."""
