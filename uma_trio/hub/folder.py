"""Our own folder of models: what is in it, how a model gets into it, and how it leaves.

====================================  ================================================================
``hub/OWNER/REPOSITORY/FILE.gguf``    models of the hub; ``FILE.gguf.json`` next to one is its manifest
``web/HOST/PATH/FILE.gguf``           models of other web servers, likewise
``aliases.json``                      names that people gave
``.downloads/KEY/``                   parts that have not arrived completely, and a lock
anything else                         GGUF files that somebody put there are models, too
====================================  ================================================================

A model is installed when its manifest is written, which happens last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import attrs
import msgspec

from uma_trio.files import read_text, replace_text, sync_folder
from uma_trio.hub.errors import AliasFileError, HubError
from uma_trio.hub.partial import DownloadFolder, DownloadState, read_record
from uma_trio.hub.variants import group_parts, quantization_of
from uma_trio.models.projector import PATTERN
from uma_trio.models.split import model_stem

DOWNLOADS: Final = ".downloads"
MANIFEST: Final = ".json"
MAX_NAME_BYTES: Final = 240


Origin = Literal["the package", "uma-trio", "Hugging Face", "LM Studio", "Ollama"]
"""Which program put a model there, and may remove it; ``the package`` is uma-trio itself."""


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


class File(msgspec.Struct, frozen=True):
    """A file of an installed model."""

    name: str
    """In the folder of the manifest."""
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a downloaded model."""

    name: str
    source: str
    revision: str | None = None
    """The commit, for a model of the hub."""
    files: list[File]
    pulled_at: float
    """Seconds since 1970."""


_MANIFEST: Final = msgspec.json.Decoder(Manifest)


class ModelFolder:
    """The folder ``root``, which may not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- what there is --------------------------------------------------------------------------

    def models(self) -> list[InstalledModel]:
        """All models whose files are whole, by name."""
        paths = gguf_files(self.root)
        whole = [self._model([paths[part] for part in parts]) for parts in group_parts(paths)]
        return sorted((model for model in whole if model is not None), key=lambda model: model.name.lower())

    def find(self, files: Sequence[Path]) -> InstalledModel | None:
        """The model, or the projector, that has these files; ``None`` if they are not whole."""
        return self._model(list(files))

    def _model(self, files: list[Path]) -> InstalledModel | None:
        try:
            sizes = [file.stat().st_size for file in files]
        except OSError:  # a link to nowhere, or it has just been removed
            return None
        model = InstalledModel(
            name=model_stem(files[0]),
            origin="uma-trio",
            files=tuple(files),
            size_bytes=sum(sizes),
            quantization=quantization_of(files[0].as_posix()),
        )
        manifest = read_record(manifest_path(files[0]), _MANIFEST)
        if manifest is None:
            return model
        if [file.size for file in manifest.files] != sizes:
            return None  # it was not installed completely
        hashes = tuple(file.sha256 for file in manifest.files)
        return attrs.evolve(model, name=manifest.name, source=manifest.source, hashes=hashes)

    # -- downloads ------------------------------------------------------------------------------

    def install_path(self, *segments: str) -> Path:
        """The path of a file, made of names that a server chose.

        Raises:
            HubError: a name cannot be one of a file here.
        """
        for segment in segments:
            if (
                segment in ("", ".", "..")
                or segment.startswith(".")
                or any(character in "/\\\0" or not character.isprintable() for character in segment)
                or len(os.fsencode(segment)) > MAX_NAME_BYTES
            ):
                raise HubError(f"the file name {'/'.join(segments)[:200]!r} cannot be used here", "use another source")
        return self.root.joinpath(*segments)

    def hub_install_path(self, place: str, path: str) -> Path:
        """Where a file of a repository goes."""
        return self.install_path("hub", *place.split("/"), *PurePosixPath(path).parts)

    def download_folder(self, name: str) -> DownloadFolder:
        """Where the parts of a download are as long as it runs."""
        return DownloadFolder(self.root / DOWNLOADS / hashlib.sha256(name.encode()).hexdigest()[:24])

    def unfinished(self) -> list[tuple[DownloadState, int]]:
        """Downloads that have not ended, each with the bytes that are here."""
        downloads = []
        with contextlib.suppress(OSError):
            for folder in map(DownloadFolder, sorted((self.root / DOWNLOADS).iterdir())):
                state = folder.state()
                if state is not None:
                    downloads.append((state, sum(folder.sizes(len(state.sizes)))))
        return downloads

    def install(self, folder: DownloadFolder, targets: Sequence[Path], manifest: Manifest) -> InstalledModel:
        """Move whole and verified parts from ``folder`` to their places, and write the manifest.  Blocks.

        After a crash in the middle the model is either not installed or whole.

        Raises:
            OSError: the disk does not take them.
        """
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        manifest_path(targets[0]).unlink(missing_ok=True)
        for number, target in enumerate(targets):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder.part(number), target)
        for parent in {target.parent for target in targets}:
            sync_folder(parent)
        replace_text(manifest_path(targets[0]), msgspec.json.encode(manifest).decode() + "\n")
        sync_folder(targets[0].parent)
        folder.remove()
        model = self._model(list(targets))
        assert model is not None
        return model

    # -- removal --------------------------------------------------------------------------------

    def remove(self, model: InstalledModel, aliases: Sequence[str]) -> None:
        """Delete the files of a model, its aliases, a projector that came with it, and folders that become empty.  Blocks.

        Raises:
            HubError: the aliases cannot be written.
            OSError: it cannot be deleted.
        """
        manifest_path(model.path).unlink(missing_ok=True)
        for file in model.files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in model.files}:
            self._remove_projectors(folder)
            self._remove_empty(folder)
        if aliases:
            with self.editing_aliases() as kept:
                for alias in aliases:
                    kept.pop(alias, None)

    def _remove_projectors(self, folder: Path) -> None:
        """Delete projectors that were downloaded, unless a model is left next to them."""
        if group_parts([path.name for path in folder.glob("*.gguf")]):
            return
        for projector in folder.glob(PATTERN):
            if manifest_path(projector).exists():
                projector.unlink(missing_ok=True)
                manifest_path(projector).unlink(missing_ok=True)

    def discard(self, name: str) -> bool:
        """Delete what is here of a download that nobody continues; whether there was something."""
        folder = self.download_folder(name)
        with folder.locked() as is_mine:
            if not is_mine or folder.state() is None:
                return False
            shutil.rmtree(folder.path)
            return True

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    # -- aliases --------------------------------------------------------------------------------

    def aliases(self) -> dict[str, str]:
        """Names that people gave, each with what it stands for."""
        try:
            return msgspec.json.decode(read_text(self._alias_file), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
            raise AliasFileError(f"cannot read {self._alias_file}: {error}", "correct or delete it") from None

    @contextlib.contextmanager
    def editing_aliases(self) -> Iterator[dict[str, str]]:
        """Yield the aliases, and write back what the block makes of them.  Another process waits meanwhile.

        Raises:
            HubError: they cannot be read or written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HubError(
                f"cannot write into {self.root}: {error.strerror}", "choose a folder with models_dir"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            aliases = self.aliases()
            yield aliases
            text = msgspec.json.format(msgspec.json.encode(dict(sorted(aliases.items()))), indent=2).decode()
            replace_text(self._alias_file, text + "\n")
        except OSError as error:
            raise HubError(
                f"cannot write {self._alias_file}: {error.strerror}", "choose a folder with models_dir"
            ) from None
        finally:
            os.close(descriptor)

    @property
    def _alias_file(self) -> Path:
        return self.root / "aliases.json"


def gguf_files(folder: Path) -> dict[str, Path]:
    """The GGUF files in ``folder``, by their paths relative to it; hidden folders are left out."""
    paths_by_name = {}
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(directory, name) for name in names if name.lower().endswith(".gguf")]
        paths_by_name.update({path.relative_to(folder).as_posix(): path for path in paths})
    return paths_by_name


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST)
