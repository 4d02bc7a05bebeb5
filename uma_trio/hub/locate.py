"""From what a person writes to a model file: a path, a name of what is here, or something to download."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from uma_trio.hub.caches import all_models
from uma_trio.hub.environment import ModelLocations
from uma_trio.hub.errors import HubError, NotInstalled
from uma_trio.hub.folder import InstalledModel, ModelFolder, Origin
from uma_trio.hub.names import HubReference, PathReference, Reference, ShortName, UrlReference, parse
from uma_trio.hub.variants import best, group_parts
from uma_trio.models.packaged import EMBEDDED_DRAFT, PACKAGED
from uma_trio.models.split import model_stem

if TYPE_CHECKING:
    from uma_trio.hub.download import PullReporter


ORIGINS: Final[tuple[Origin, ...]] = ("the package", "uma-trio", "Hugging Face", "LM Studio", "Ollama")
"""The first one counts where several have the same model."""


@attrs.frozen
class LocatedModel:
    """A model file, and what to call it."""

    path: Path
    name: str
    """Under which clients see it."""


def find_here(text: str, places: ModelLocations) -> LocatedModel:
    """What ``text`` means among the models of this machine.  Blocks, and opens no connection.

    Args:
        text: ``embedded``, ``embedded-draft``, a path, an alias or a name.

    Raises:
        NotInstalled: it could be downloaded, or there is no such name.
        HubError: it means nothing, or several models.
    """
    if text in PACKAGED:
        return LocatedModel(PACKAGED[text], text)
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise HubError(f"there is no user {text.split('/')[0][1:]}", "check the path") from None
    if path.is_file():
        return LocatedModel(path, model_stem(path))
    if path.is_dir() and len(models := _models_in(path)) == 1:
        return LocatedModel(models[0], model_stem(models[0]))
    reference, name = resolve(text, places)
    if isinstance(reference, PathReference):
        return LocatedModel(path, model_stem(path))  # opening it reports that it is missing or a folder
    try:
        model = find(reference, all_models(places), ModelFolder(places.folder).aliases())
    except NotInstalled as error:
        if isinstance(reference, HubReference | UrlReference):
            raise NotInstalled(error.reason, f"download it with: uma-trio pull {text}") from None
        raise
    return LocatedModel(model.path, name or model.served_name)


def find_installed(text: str, places: ModelLocations) -> LocatedModel:
    """What a client's ``text`` means among the models that have a name: an alias or a name, and never a path.  Blocks.

    Raises:
        HubError: there is no such model, or several.
    """
    reference, name = resolve(text, places)
    if isinstance(reference, PathReference) and name is not None:  # an alias, which the user of this machine made
        return LocatedModel(Path(reference.path), name)
    model = find(reference, all_models(places), ())
    return LocatedModel(model.path, name or model.served_name)


def installed_models(places: ModelLocations) -> list[LocatedModel]:
    """All that ``find_installed`` finds by its own name, but the draft model, which answers nobody.  Blocks."""
    return [LocatedModel(model.path, model.served_name) for model in all_models(places) if model.path != EMBEDDED_DRAFT]


async def find_or_pull(text: str, places: ModelLocations, reporter: PullReporter) -> LocatedModel:
    """As ``find_here``; downloads a model of the hub or a URL that is not here.

    Raises:
        HubError: there is no such model, or it cannot be downloaded.
    """
    import trio  # the runtime of controllers asks ``find_here`` alone, and has no event loop

    try:
        return await trio.to_thread.run_sync(find_here, text, places)
    except NotInstalled:
        reference, name = resolve(text, places)
        if places.is_offline or not isinstance(reference, HubReference | UrlReference):
            raise
    from uma_trio.hub.pull import Puller  # with a client of HTTP, which a model of this machine does not need

    model = await Puller(places, reporter).pull(reference)
    return LocatedModel(model.path, name or model.served_name)


def resolve(text: str, places: ModelLocations) -> tuple[Reference, str | None]:
    """What ``text`` refers to, and the alias if it is one.

    Raises:
        HubError: it is not a name.
    """
    aliases = {name.lower(): (name, meaning) for name, meaning in ModelFolder(places.folder).aliases().items()}
    if text.lower() in aliases:
        name, meaning = aliases[text.lower()]
        return parse(meaning, places.endpoint), name
    return parse(text, places.endpoint), None


def aliases_of(model: InstalledModel, models: Iterable[InstalledModel], places: ModelLocations) -> list[str]:
    """The aliases that mean ``model``, one of ``models``."""
    models = [*models]
    aliases = []
    for name, meaning in ModelFolder(places.folder).aliases().items():
        try:
            reference = parse(meaning, places.endpoint)
            is_path = isinstance(reference, PathReference)
            path = Path(meaning) if is_path else find(reference, models, ()).path
        except HubError:  # nobody has that model, or the alias was written by hand
            continue
        if path == model.path:
            aliases.append(name)
    return aliases


def _models_in(folder: Path) -> list[Path]:
    paths = {file.as_posix(): file for file in folder.iterdir() if file.is_file()}
    return [paths[parts[0]] for parts in group_parts(paths)]


def find(reference: Reference, models: Iterable[InstalledModel], aliases: Iterable[str]) -> InstalledModel:
    """The model that ``reference`` means.

    Args:
        aliases: further names, for suggestions.

    Raises:
        NotInstalled: there is none.
        HubError: there are several.
    """
    models = sorted(models, key=lambda model: ORIGINS.index(model.origin))
    text = str(reference)
    matching = _matching(reference, models)
    if not matching:
        near = difflib.get_close_matches(text, [*(model.name for model in models), *aliases], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise NotInstalled(
            f"there is no model {text} on this machine", f"{hint}`uma-trio models` lists the installed models"
        )
    names = list(dict.fromkeys(model.name.lower() for model in matching))
    if len(names) > 1:
        shown = ", ".join(dict.fromkeys(model.name for model in matching))
        raise HubError(f"{text} may mean {len(names)} models", f"write one of {shown}")
    return matching[0]


def _matching(reference: Reference, models: Sequence[InstalledModel]) -> list[InstalledModel]:
    if isinstance(reference, UrlReference):
        return [model for model in models if model.source == str(reference)]
    if isinstance(reference, HubReference) and reference.choice is None:
        return _preferred(
            [model for model in models if _same(model.name_without_quantization, reference.repository_at_revision)]
        )
    if isinstance(reference, HubReference):
        place, choice = reference.repository_at_revision, (reference.choice or "").lower()
        there = [model for model in models if _same(model.name_without_quantization, place)]
        names = {f"{place}:{choice}".lower(), f"{place}:UD-{choice}".lower()}
        stems = {choice, choice.removesuffix(".gguf")}
        return [model for model in there if model.name.lower() in names or model.path.stem.lower() in stems]
    if isinstance(reference, ShortName):
        return _by_short_name(reference.name.lower(), models)
    return []


def _by_short_name(name: str, models: Sequence[InstalledModel]) -> list[InstalledModel]:
    """The matches of the first rule that matches anything."""
    place, _, choice = name.partition(":")
    choice = "" if choice == "latest" else choice

    def without_owner(text: str) -> str:
        return text.rpartition("/")[2].lower()

    def is_repository(model: InstalledModel) -> bool:
        last = without_owner(model.name_without_quantization)
        return place in (last, last.removesuffix("-gguf"))

    if matching := [
        model for model in models if model.name.lower() in (name, f"{name}:latest", place if not choice else name)
    ]:
        return matching
    if choice:
        return [
            model
            for model in models
            if is_repository(model) and model.name.partition(":")[2].lower() in (choice, f"ud-{choice}")
        ]
    if matching := [model for model in models if model.path.stem.lower() == name]:
        return matching
    return _preferred([model for model in models if is_repository(model)])


def _preferred(models: list[InstalledModel]) -> list[InstalledModel]:
    """One model of each repository, with the default quantization."""
    places = dict.fromkeys(model.name_without_quantization.lower() for model in models)
    chosen = []
    for place in places:
        chosen.append(
            best([(model.quantization, model) for model in models if model.name_without_quantization.lower() == place])
        )
    return chosen


def _same(one: str, other: str) -> bool:
    return one.lower() == other.lower()
