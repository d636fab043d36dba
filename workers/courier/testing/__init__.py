"""A real courier for tests."""
