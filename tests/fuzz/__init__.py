"""Fuzzers with fixed seeds: ``fuzz`` for the protocol, and ``mutate_gguf`` for model files."""
