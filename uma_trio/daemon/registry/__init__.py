"""Models by name: which are served, which of them are loaded, and who waits for which."""

from uma_trio.daemon.registry.model import ModelOpener, ModelSpec, OpenModel
from uma_trio.daemon.registry.registry import ModelRegistry
from uma_trio.daemon.registry.room import Needs

__all__ = ["ModelOpener", "ModelRegistry", "ModelSpec", "Needs", "OpenModel"]
