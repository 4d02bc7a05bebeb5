"""The daemon's process.  docs/ARCHITECTURE.md lists its packages."""
