"""Random abuse, seeded: ``python -m tests.fuzz.fuzz``."""
