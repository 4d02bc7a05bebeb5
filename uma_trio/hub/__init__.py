"""Models by name: what is on this machine, whoever put it there, and what can be downloaded.  See docs/MODELS.md."""
