"""OpenAI and admin routes: converts HTTP to messages and back, nothing else."""
