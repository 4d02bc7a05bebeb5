"""Serves sequences with one engine: the tick, and what it needs.  docs/ARCHITECTURE.md lists the modules."""
