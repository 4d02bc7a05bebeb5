"""Computes steps with llama.cpp, in a process of its own.  Only this room imports ``llama_abi``."""
