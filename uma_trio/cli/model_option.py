"""The option ``--model`` of commands that load a model: a path, a name, or something to download."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from uma_trio.config import Config
    from uma_trio.hub.environment import Places


def places_of(config: Config, environment: Mapping[str, str] = os.environ) -> Places:
    """Where models are, by the settings and the environment.

    Raises:
        HubError: a variable is not valid.
    """
    from uma_trio.hub.environment import find_places

    return find_places(environment, config.model.models_dir, is_offline=config.model.offline)


def environment_places() -> Places:
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

    return None if model is None else find_here(model, environment_places()).path


def is_path_of_model(model: str) -> bool:
    """Whether a setting ``model`` is a path, and not a name."""
    from uma_trio.hub.errors import HubError
    from uma_trio.hub.names import PathReference, parse

    try:
        return os.path.exists(os.path.expanduser(model)) or isinstance(parse(model), PathReference)
    except HubError:
        return False


def located(config: Config, *, may_pull: bool) -> Config:
    """The settings with the path of the model in place of its name, and the name as alias.

    Shows a progress bar on stderr while a model is downloaded.

    Raises:
        HubError: there is no such model, or it cannot be downloaded.
        Interrupted: a signal ended the download.
    """
    if config.model.model is None:
        return config
    from uma_trio.hub.errors import NotInstalled
    from uma_trio.hub.locate import find_here, find_or_pull

    name, places = config.model.model, places_of(config)
    try:
        found = find_here(name, places)
    except NotInstalled:
        if not may_pull or places.is_offline:
            raise
        from uma_trio.cli.pull_view import pull_view
        from uma_trio.cli.run_trio import run, until_interrupted

        with pull_view() as view:
            found = run(until_interrupted, lambda: find_or_pull(name, places, view))
    model = attrs.evolve(config.model, model=str(found.path), alias=config.model.alias or found.name)
    return attrs.evolve(config, model=model)
