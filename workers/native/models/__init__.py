"""Decoder models: configuration, weights, forward pass, tokenizer."""
