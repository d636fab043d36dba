"""The PyTorch engine and its server."""
