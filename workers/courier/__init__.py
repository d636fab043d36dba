"""Moves KV between hosts and engines as slot files of llama.cpp."""
