"""The native worker's own OpenAI server."""
