"""All models of this machine."""

from __future__ import annotations

from uma_trio.hub.caches import cached_models
from uma_trio.hub.environment import Places
from uma_trio.hub.folder import ModelFolder
from uma_trio.hub.installed import InstalledModel


def all_models(places: Places) -> list[InstalledModel]:
    """Every model of this machine that has a name, ours first.  Blocks."""
    return [*ModelFolder(places.folder).models(), *cached_models(places)]
