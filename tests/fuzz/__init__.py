"""Fuzzer of the protocol, seeded: ``python -m tests.fuzz.fuzz``."""
