"""Serves answers with one engine: ``Scheduler`` and what its tick needs.  docs/design/scheduler.md lists the modules."""
