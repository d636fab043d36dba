"""From logits to a token, the same on any worker for the same seed and position."""
