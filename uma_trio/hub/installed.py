"""Models on this machine, and which of them a name means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import attrs

from uma_trio.hub.errors import HubError, NotInstalled
from uma_trio.hub.names import HubReference, Reference, ShortName, UrlReference
from uma_trio.hub.variants import best

Origin = Literal["the package", "uma-trio", "Hugging Face", "LM Studio", "Ollama"]
"""Which program put a model there, and may remove it; ``the package`` is uma-trio itself."""

ORIGINS: Final[tuple[Origin, ...]] = ("the package", "uma-trio", "Hugging Face", "LM Studio", "Ollama")
"""The first one counts where several have the same model."""


@attrs.frozen(kw_only=True)
class InstalledModel:
    """A model of this machine, whose files are whole."""

    name: str
    """``owner/repository:QUANTIZATION``, Ollama's name, or that of the file without ``.gguf``."""
    origin: Origin
    files: tuple[Path, ...]
    """Its parts in order.  llama.cpp gets the first one and finds the others."""
    size_bytes: int
    quantization: str = ""
    """``""`` if unknown."""
    source: str | None = None
    """Where it was downloaded from; ``None`` if nobody noted it."""
    hashes: tuple[str | None, ...] = ()
    """SHA-256 of each file, where known without reading it."""

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def served_name(self) -> str:
        """What clients see: the name, without the tag that Ollama's clients add by themselves."""
        return self.name.removesuffix(":latest")

    @property
    def name_without_quantization(self) -> str:
        """The name without the quantization."""
        return self.name.partition(":")[0]


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
    found = _matching(reference, models)
    if not found:
        near = difflib.get_close_matches(text, [*(model.name for model in models), *aliases], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise NotInstalled(
            f"there is no model {text} on this machine", f"{hint}`uma-trio models` lists the installed models"
        )
    names = list(dict.fromkeys(model.name.lower() for model in found))
    if len(names) > 1:
        shown = ", ".join(dict.fromkeys(model.name for model in found))
        raise HubError(f"{text} may mean {len(names)} models", f"write one of {shown}")
    return found[0]


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

    if found := [
        model for model in models if model.name.lower() in (name, f"{name}:latest", place if not choice else name)
    ]:
        return found
    if choice:
        return [
            model
            for model in models
            if is_repository(model) and model.name.partition(":")[2].lower() in (choice, f"ud-{choice}")
        ]
    if found := [model for model in models if model.path.stem.lower() == name]:
        return found
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
