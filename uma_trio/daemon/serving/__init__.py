"""Serves answers with one engine: the tick, and what it needs.  docs/design/scheduler.md lists the modules."""
