"""The option ``--model`` of commands that load a model: a path, a name, or something to download."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from uma_trio.config import Adapter, Config, ModelEntry
    from uma_trio.hub.environment import ModelLocations
    from uma_trio.hub.locate import LocatedModel


def places_of(config: Config) -> ModelLocations:
    """Where models are, by the settings and the environment.

    Raises:
        HubError: a variable is not valid.
    """
    from uma_trio.hub.environment import find_model_locations

    return find_model_locations(os.environ, config.model.models_dir, is_offline=config.model.offline)


def model_locations_of_environment() -> ModelLocations:
    """As ``places_of``, for commands that take no settings but those of the environment.

    Raises:
        HubError: a variable is not valid.
        ConfigError: a ``UMA_`` variable is not valid.
    """
    from uma_trio import config

    return places_of(config.load(None, os.environ))


def find_model(model: str | None) -> Path | None:
    """The file of a model of this machine; ``None`` for the embedded one.  Nothing is downloaded.

    Raises:
        HubError: there is no such model.
    """
    from uma_trio.hub.locate import find_here

    return None if model is None else find_here(model, model_locations_of_environment()).path


def is_path_of_model(model: str) -> bool:
    """Whether a setting ``model`` is a path, and not a name."""
    from uma_trio.hub.errors import HubError
    from uma_trio.hub.names import PathReference, parse

    try:
        return os.path.exists(os.path.expanduser(model)) or isinstance(parse(model), PathReference)
    except HubError:
        return False


def located(config: Config, *, may_pull: bool) -> Config:
    """The settings with the paths of models and adapters in place of their names, and the models' names as aliases.

    Shows a progress bar on stderr while a model is downloaded.

    Raises:
        HubError: there is no such model, or it cannot be downloaded.
        ConfigError: two models have the same name.
        Interrupted: a signal ended the download.
    """
    places = places_of(config)
    model = config.model
    if model.draft_model is not None:
        draft = locate(model.draft_model, places, may_pull=may_pull)
        model = attrs.evolve(model, draft_model=str(draft.path))
    model = attrs.evolve(model, adapters=_located_adapters(model.adapters, places, may_pull=may_pull))
    if model.model is not None and not config.models:
        here = locate(model.model, places, may_pull=may_pull)
        model = attrs.evolve(model, model=str(here.path), alias=model.alias or here.name)
    models = _located_entries(config.models, places, may_pull=may_pull)
    return attrs.evolve(config, model=model, models=models)


def _located_entries(
    entries: Sequence[ModelEntry], places: ModelLocations, *, may_pull: bool
) -> tuple[ModelEntry, ...]:
    from uma_trio.config import ConfigError
    from uma_trio.protocol.answers import bare_name

    located: list[ModelEntry] = []
    taken: set[str] = set()
    for entry in entries:
        model = locate(entry.model, places, may_pull=may_pull)
        name = bare_name(entry.name or model.name)
        for called in (name, *entry.alias):
            if called in taken:
                raise ConfigError(f"two models are called {called}; give them different names in the list models")
            taken.add(called)
        settings = dict(entry.settings)
        if settings.get("draft_model") is not None:
            settings["draft_model"] = str(locate(settings["draft_model"], places, may_pull=may_pull).path)
        if settings.get("adapters"):
            settings["adapters"] = _located_adapters(settings["adapters"], places, may_pull=may_pull)
        located.append(attrs.evolve(entry, model=str(model.path), name=name, settings=settings))
    return tuple(located)


def _located_adapters(adapters: Sequence[Adapter], places: ModelLocations, *, may_pull: bool) -> tuple[Adapter, ...]:
    return tuple(
        [
            adapter
            if os.path.exists(os.path.expanduser(adapter.path))
            else attrs.evolve(adapter, path=str(locate(adapter.path, places, may_pull=may_pull).path))
            for adapter in adapters
        ]
    )


def locate(name: str, places: ModelLocations, *, may_pull: bool) -> LocatedModel:
    """What ``name`` means on this machine; downloads it if it is not here, with a progress bar on stderr.

    Raises:
        HubError: there is no such model, or it cannot be downloaded.
        Interrupted: a signal ended the download.
    """
    from uma_trio.hub.errors import NotInstalled
    from uma_trio.hub.locate import find_here, find_or_pull

    try:
        return find_here(name, places)
    except NotInstalled:
        if not may_pull or places.is_offline:
            raise
        from uma_trio.cli.pull_view import pull_view
        from uma_trio.cli.run_trio import run, until_interrupted

        with pull_view() as view:
            pulled: LocatedModel = run(until_interrupted, lambda: find_or_pull(name, places, view))
            return pulled
