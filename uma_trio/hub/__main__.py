"""Changes the models of this machine for another program: ``python -m uma_trio.hub TASK``, where TASK is JSON.

The gateway starts it for Ollama's clients.  It writes one JSON object in each line: the progress of a download, at last
``{"is_done": true}``, or ``{"error": ..., "kind": ...}``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import trio

from uma_trio.errors import ErrorWithRemedy
from uma_trio.hub.caches import all_models
from uma_trio.hub.download import PullReporter
from uma_trio.hub.environment import ModelLocations, find_model_locations
from uma_trio.hub.errors import HubError, NotInstalled
from uma_trio.hub.folder import ModelFolder
from uma_trio.hub.locate import aliases_of, find, find_installed, resolve
from uma_trio.hub.names import EXAMPLES, HubReference, PathReference, UrlReference, check_alias
from uma_trio.hub.pull import Puller

PROGRESS_S: Final = 0.2
"""Least time between two lines about one file."""


class InUse(HubError):
    """The model to delete is loaded."""


KINDS: Final[dict[type[Exception], str]] = {NotInstalled: "missing", InUse: "loaded"}
"""``kind`` of the errors that the gateway answers in their own ways; that of all others is ``other``."""


class Task(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to do."""

    action: Literal["pull", "delete", "copy"]
    model: str
    """As people name it; never a path."""
    new_name: str = ""
    """What a copy is called."""
    folder: Path | None = None
    """Where downloaded models are."""
    is_offline: bool = False
    in_use: list[str] = []
    """Files of models that are loaded; they are not deleted."""


_TASK: Final = msgspec.json.Decoder(Task, dec_hook=lambda cls, value: cls(value))


def say(**fields: Any) -> None:
    """Write a line."""
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
    sys.stdout.flush()


class Lines(PullReporter):
    """Writes the progress of a download, each file at most once in ``PROGRESS_S``."""

    def __init__(self) -> None:
        self._said_at: dict[int, float] = {}
        self._first_numbers: dict[str, int] = {}
        """The number of the first file of each download."""
        self._n_files = 0

    def start(self, name: str, sizes: Sequence[int | None]) -> None:
        """See ``PullReporter``."""
        if name not in self._first_numbers:
            self._first_numbers[name] = self._n_files
            self._n_files += len(sizes)

    def progress(self, number: int, done: int, size: int | None) -> None:
        """See ``PullReporter``."""
        now = time.monotonic()
        number += max(self._first_numbers.values())  # counted from the first file of the download that began last
        if done == size or now - self._said_at.get(number, -PROGRESS_S) >= PROGRESS_S:
            self._said_at[number] = now
            say(number=number, completed=done, total=size)

    def message(self, text: str) -> None:
        """See ``PullReporter``."""
        say(message=text)


def _places(task: Task) -> ModelLocations:
    return find_model_locations(os.environ, task.folder, is_offline=task.is_offline)


def _hub_reference(task: Task, places: ModelLocations) -> HubReference | UrlReference | None:
    """The place of the task's model in the hub; ``None`` if its name stands for a model of this machine.

    Raises:
        HubError: it is a path or a URL, or not a name.
    """
    reference, alias = resolve(task.model, places)
    if alias is None and isinstance(reference, PathReference | UrlReference):
        raise HubError(f"{task.model[:200]!r} does not name a model", "give one such as Qwen/Qwen3-0.6B-GGUF:Q8_0")
    return reference if isinstance(reference, HubReference | UrlReference) else None


def pull(task: Task) -> None:
    """Download a model of the hub, unless it is here.

    Raises:
        HubError: it is not here, and cannot be downloaded.
    """
    places = _places(task)
    reference = _hub_reference(task, places)
    if reference is None:
        try:
            find_installed(task.model, places)
        except NotInstalled as error:
            raise NotInstalled(
                error.reason, f"only models of the Hugging Face Hub are downloaded: {EXAMPLES}"
            ) from None
    else:
        trio.run(Puller(places, Lines()).pull, reference, strict_exception_groups=False)


def delete(task: Task) -> None:
    """Forget an alias, or delete a model that was downloaded, with its aliases.

    Raises:
        HubError: there is no such model, another program keeps it, or it is in use.
    """
    places = _places(task)
    folder = ModelFolder(places.folder)
    with folder.editing_aliases() as aliases:
        if aliases.pop(next((alias for alias in aliases if alias.lower() == task.model.lower()), ""), None) is not None:
            return
    _hub_reference(task, places)  # refuses a path
    models = all_models(places)
    reference, _ = resolve(task.model, places)
    model = find(reference, models, folder.aliases())
    if model.origin != "uma-trio":
        raise HubError(f"{model.name} is kept by {model.origin}", "remove it there")
    if any(str(file.resolve()) in task.in_use for file in model.files):
        raise InUse(f"{model.name} is loaded", "unload it first: uma-trio models unload")
    folder.remove(model, aliases_of(model, models, places))


def copy(task: Task) -> None:
    """Give a model of this machine a further name.

    Raises:
        HubError: there is no such model, or the name cannot be one.
    """
    places = _places(task)
    check_alias(task.new_name)
    _hub_reference(task, places)  # refuses a path
    find_installed(task.model, places)
    with ModelFolder(places.folder).editing_aliases() as aliases:
        aliases[task.new_name] = aliases.get(task.model, task.model)


def main() -> None:
    """Do the task of the command line."""
    try:
        task = _TASK.decode(sys.argv[1])
        {"pull": pull, "delete": delete, "copy": copy}[task.action](task)
    except ErrorWithRemedy as error:
        say(error=str(error), kind=KINDS.get(type(error), "other"))
    except OSError as error:
        say(error=f"the models cannot be changed: {error.strerror or error}", kind="other")
    else:
        say(is_done=True)


if __name__ == "__main__":
    main()
