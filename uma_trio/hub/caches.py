"""All models of this machine, including the models that other programs keep: used in place, never changed.

===============  ==========================================================================================
Ollama           ``manifests/HOST/NAMESPACE/MODEL/TAG``, JSON that names ``blobs/sha256-HASH``
Hugging Face     ``models--OWNER--REPOSITORY/snapshots/COMMIT/FILE``, links to ``blobs/HASH``; ``refs/main``
LM Studio        ``OWNER/REPOSITORY/FILE.gguf``
===============  ==========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from uma_trio.files import read_text
from uma_trio.hub.environment import ModelLocations
from uma_trio.hub.folder import InstalledModel, ModelFolder, Origin, gguf_files
from uma_trio.hub.names import HUB_HOSTS
from uma_trio.hub.variants import group_parts, hex_hash, quantization_of
from uma_trio.models.packaged import PACKAGED, PACKAGED_QUANTIZATION

OLLAMA_HOST: Final = "registry.ollama.ai"
OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
OLLAMA_PROJECTOR: Final = "application/vnd.ollama.image.projector"


def all_models(places: ModelLocations) -> list[InstalledModel]:
    """Every model of this machine that has a name: those of the package, ours, those of others.  Blocks."""
    return [*packaged_models(), *ModelFolder(places.folder).models(), *cached_models(places)]


def packaged_models() -> list[InstalledModel]:
    """The models that come with the package, as far as the installation has them.  Blocks."""
    there = {name: path for name, path in PACKAGED.items() if path.is_file()}
    return [
        InstalledModel(
            name=name,
            origin="the package",
            files=(path,),
            size_bytes=path.stat().st_size,
            quantization=PACKAGED_QUANTIZATION,
        )
        for name, path in there.items()
    ]


def cached_models(places: ModelLocations) -> list[InstalledModel]:
    """The models of all other programs.  A broken entry counts as none.  Blocks."""
    models: list[InstalledModel] = []
    if places.huggingface is not None:
        models += _huggingface(places.huggingface)
    for folder in places.lmstudio:
        models += _lmstudio(folder)
    for folder in places.ollama:
        models += _ollama(folder)
    return models


# -- Hugging Face -----------------------------------------------------------------------------------


def _huggingface(cache: Path) -> Iterator[InstalledModel]:
    for repository in _entries(cache):
        kind, _, rest = repository.name.partition("--")
        owner, _, name = rest.partition("--")
        if kind != "models" or not owner or not name:
            continue
        seen: set[str] = set()
        for snapshot in _snapshots(repository):
            files = gguf_files(snapshot)
            for parts in group_parts(files):
                if parts[0] not in seen:
                    seen.add(parts[0])
                    yield from _model(f"{owner}/{name}", parts[0], [files[part] for part in parts], "Hugging Face")


def _snapshots(repository: Path) -> list[Path]:
    """The snapshots, that of the main branch first, then the newest."""
    snapshots = {snapshot.name: snapshot for snapshot in _entries(repository / "snapshots")}
    try:
        main = read_text(repository / "refs" / "main").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return sorted(snapshots.values(), key=lambda snapshot: (snapshot.name != main, -_modified(snapshot)))


# -- LM Studio --------------------------------------------------------------------------------------


def _lmstudio(folder: Path) -> Iterator[InstalledModel]:
    for owner in _entries(folder):
        for repository in _entries(owner):
            files = gguf_files(repository)
            for parts in group_parts(files):
                place = f"{owner.name}/{repository.name}"
                yield from _model(place, parts[0], [files[part] for part in parts], "LM Studio")


# -- Ollama -----------------------------------------------------------------------------------------


class _Layer(msgspec.Struct):
    mediaType: str  # noqa: N815 - as in the file
    digest: str


class _Manifest(msgspec.Struct):
    layers: list[_Layer]
    config: _Layer | None = None


class _Config(msgspec.Struct):
    model_format: str = "gguf"
    file_type: str = ""


_MANIFEST: Final = msgspec.json.Decoder(_Manifest)
_CONFIG: Final = msgspec.json.Decoder(_Config)


def _ollama(folder: Path) -> Iterator[InstalledModel]:
    for path, parts in _ollama_manifests(folder):
        if (model := _ollama_model(folder, path, *parts)) is not None:
            yield model


def _ollama_manifests(folder: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Every manifest, and what its path says: host, namespace, name, tag."""
    manifests = folder / "manifests"
    for directory, _, names in os.walk(manifests):
        for tag in sorted(names):
            path = Path(directory, tag)
            match path.relative_to(manifests).parts:
                case (host, namespace, name, _):
                    yield path, (host, namespace, name, tag)


def ollama_projectors(model: Path) -> list[Path]:
    """The projectors of a model that Ollama keeps; none if it is not one of them.  Blocks.

    Args:
        model: the file with its weights.
    """
    folder = model.parent.parent
    projectors: list[Path] = []
    if model.parent.name == "blobs":
        for path, _ in _ollama_manifests(folder):
            try:
                layers = _MANIFEST.decode(read_text(path)).layers
                files = [(layer.mediaType, _blob(folder, layer.digest)) for layer in layers]
            except (OSError, UnicodeDecodeError, ValueError, RecursionError):  # as below
                continue
            if (OLLAMA_MODEL, model) in files:
                projectors += [file for kind, file in files if kind == OLLAMA_PROJECTOR and file not in projectors]
    return projectors


def _ollama_model(folder: Path, path: Path, host: str, namespace: str, name: str, tag: str) -> InstalledModel | None:
    try:
        manifest = _MANIFEST.decode(read_text(path))
        config = _Config()
        if manifest.config is not None:
            config = _CONFIG.decode(read_text(_blob(folder, manifest.config.digest)))
        (digest,) = [layer.digest for layer in manifest.layers if layer.mediaType == OLLAMA_MODEL]
        blob = _blob(folder, digest)
        size = blob.stat().st_size
    except (OSError, UnicodeDecodeError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    if config.model_format != "gguf":
        return None
    place = f"{namespace}/{name}"
    if host == OLLAMA_HOST:
        place = name if namespace == "library" else place
    elif host not in HUB_HOSTS:
        place = f"{host}/{place}"
    return InstalledModel(
        name=f"{place}:{tag}",
        origin="Ollama",
        files=(blob,),
        size_bytes=size,
        quantization=config.file_type,
        hashes=(hex_hash(digest),),
    )


def _blob(folder: Path, digest: str) -> Path:
    hash_hex = hex_hash(digest)
    if hash_hex is None:
        raise ValueError("not a digest")
    return folder / "blobs" / f"sha256-{hash_hex}"


# -- all of them ------------------------------------------------------------------------------------


def _model(place: str, path: str, files: list[Path], origin: Origin) -> Iterator[InstalledModel]:
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError:  # a link to a blob that is not there
        return
    quantization = quantization_of(path)
    yield InstalledModel(
        name=f"{place}:{quantization or path}",
        origin=origin,
        files=tuple(files),
        size_bytes=size,
        quantization=quantization,
        hashes=tuple(hex_hash(file.resolve().name) for file in files),
    )


def _entries(folder: Path) -> list[Path]:
    """The folders in ``folder``, sorted; none if it cannot be read."""
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
