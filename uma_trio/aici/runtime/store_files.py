"""The store of modules on disk: for each owner a folder with modules and tags, so that nothing is shared by accident.

Files are replaced whole.  Machine code runs as it is, so nobody else may have written it.  The same module of two owners is
there twice.  A tag has a file of its own, so that damage takes one tag and no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from uma_trio.aici.runtime.module_space import StoredModule
from uma_trio.aici_link.messages import ModuleRecord, TagInfo
from uma_trio.files import read_text
from uma_trio.protocol.controllers import is_tag

if TYPE_CHECKING:  # the store needs no engine
    from uma_trio.aici.runtime.host import Module, WasmHost

log = logging.getLogger(__name__)

MODULE_ID: Final = re.compile(r"[0-9a-f]{64}")
ABANDONED_S: Final = 3600.0
"""A temporary file older than this was left by a killed process."""
_NAME: Final = "owner"
"""File with the name of the owner, for lists."""
DIGEST_BYTES: Final = 32
"""Length of the SHA-256 behind the code.  Code that the disk has damaged must not run."""


def replace_compiled(path: Path, compiled: bytes) -> None:
    """Write machine code, or leave the file as it is.  Raises ``OSError``."""
    replace_file(path, compiled, hashlib.sha256(compiled).digest())


def read_compiled(path: Path) -> bytes:
    """Machine code.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or another user can write to its folder.
    """
    status = path.parent.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others can write to {path.parent}")
    data = path.read_bytes()
    compiled, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(compiled).digest() != digest:
        raise ValueError("the machine code is damaged")
    return compiled


def load_or_compile(path: Path, name: str, host: WasmHost, compiled: Callable[[], bytes]) -> Module:
    """The module whose machine code is at ``path``.  If that cannot be used, it is compiled, and kept there.

    Args:
        name: of the module, for the log.
        compiled: compiles it.
    """
    try:
        return host.load(read_compiled(path))
    except FileNotFoundError:
        pass  # it was never compiled here
    except (OSError, ValueError) as error:  # compiled by another version, or damaged
        log.info("%s is compiled again: %s", name, error)
    code = compiled()
    try:
        replace_compiled(path, code)
    except OSError as error:
        log.warning("cannot keep the machine code of %s: %s", name, error)
    return host.load(code)


def replace_file(path: Path, *parts: bytes) -> None:
    """Write a file, or leave it as it is.  Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class OwnedTag(TagInfo, frozen=True):
    """A tag as it is stored."""

    owner: str
    """Owner of the module that the tag names; an administrator may have set the tag."""

    @property
    def info(self) -> TagInfo:
        """What everybody may know of the tag."""
        return TagInfo(**{name: getattr(self, name) for name in TagInfo.__struct_fields__})


_TAG: Final = msgspec.json.Decoder(OwnedTag)


class TagFiles:
    """The tags in a folder.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str) -> OwnedTag | None:
        """The tag of this name; ``None`` if there is no such tag, or its file is damaged."""
        if not is_tag(name):
            return None
        path = self._path(name)
        try:
            tag = _TAG.decode(read_text(path))
            if tag.tag != name or not MODULE_ID.fullmatch(tag.module_id):
                raise ValueError("the file is of another tag")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            warn_once(path, f"the tag {name} is ignored, its file is damaged: {error}")
            return None
        return tag

    def all(self) -> list[OwnedTag]:
        """All tags whose files can be read."""
        return [tag for name in self.names() if (tag := self.find(name)) is not None]

    def names(self) -> list[str]:
        """The names of all tags that have a file, damaged or not."""
        try:
            file_names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            warn_once(self._folder, f"the tags in {self._folder} cannot be read: {error.strerror}")
            return []
        return [
            name
            for file_name in file_names
            if file_name.endswith(".json") and is_tag(name := file_name.removesuffix(".json"))
        ]

    def write(self, tags: Iterable[OwnedTag]) -> None:
        """Set tags.  Raises ``OSError``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for tag in tags:
            replace_file(self._path(tag.tag), msgspec.json.encode(tag))
            _warned.discard(self._path(tag.tag))

    def remove(self, name: str) -> None:
        """Remove a tag.  Raises ``OSError``."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


_warned: set[Path] = set()


def warn_once(path: Path, message: str) -> None:
    """Log what is wrong with a file, the first time."""
    if path not in _warned:
        _warned.add(path)
        log.warning("%s", message)


class OwnerFiles:
    """The folder of ``owner`` below ``folder``.  It need not exist."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.owner = owner
        self._folder = folder / _folder_name(owner)
        self.tags = TagFiles(self._folder / "tags")

    def has(self, module_id: str) -> bool:
        """Whether the module is there, whole or damaged."""
        return self.wasm(module_id).is_file()

    def is_whole(self, module_id: str) -> bool:
        """Whether the module and its machine code are there, and the module is not damaged."""
        try:
            return self.compiled(module_id).is_file() and self.read(module_id) is not None
        except OSError:
            return False

    def read(self, module_id: str) -> bytes | None:
        """The module; ``None`` if it is damaged.  Raises ``OSError``."""
        wasm = self.wasm(module_id).read_bytes()
        return wasm if hashlib.sha256(wasm).hexdigest() == module_id else None

    def write(self, module_id: str, wasm: bytes, compiled: bytes) -> None:
        """Write a module, or nothing.  Raises ``OSError``."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _name_in(self._folder) != self.owner:
                replace_file(self._folder / _NAME, self.owner.encode())
            replace_compiled(self.compiled(module_id), compiled)
            replace_file(self.wasm(module_id), wasm)
            self.note_use(module_id)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.remove(module_id)
            raise OSError(error.errno, f"the module cannot be stored: {error.strerror}") from None

    def remove(self, module_id: str) -> None:
        """Remove a module.  Raises ``OSError``."""
        self.wasm(module_id).unlink(missing_ok=True)
        self.compiled(module_id).unlink(missing_ok=True)

    def note_use(self, module_id: str) -> None:
        """Note a use: the least recently used modules are removed first.  Raises ``OSError``."""
        now = time.time_ns()  # file timestamps of the kernel advance in milliseconds
        os.utime(self.wasm(module_id), ns=(now, now))

    def stored(self) -> Iterator[StoredModule]:
        """All modules, with the room that they take."""
        tagged = {tag.module_id for tag in self.tags.all()}
        sizes: dict[str, int] = {}
        used_at: dict[str, float] = {}
        for name, status in _files_of(self._folder):
            if name.endswith(".tmp"):
                if time.time() - status.st_mtime > ABANDONED_S:
                    (self._folder / name).unlink(missing_ok=True)
            elif MODULE_ID.fullmatch(module_id := name.partition(".")[0]):
                sizes[module_id] = sizes.get(module_id, 0) + status.st_size
                if name.endswith(".wasm"):
                    used_at[module_id] = status.st_mtime
        for module_id, size in sizes.items():
            yield StoredModule(self.owner, module_id, size, used_at.get(module_id, 0.0), module_id in tagged)

    def records(self, shared: Iterable[OwnedTag]) -> Iterator[ModuleRecord]:
        """Its modules as their owner sees them, with their tags; ``shared`` are the tags for everybody."""
        names: dict[str, list[str]] = {}
        for tag in (*self.tags.all(), *shared):
            if tag.owner == self.owner:
                names.setdefault(tag.module_id, []).append(tag.tag)
        for stored in self.stored():
            wasm_size, compiled_size = self.sizes(stored.module_id)
            if wasm_size:  # otherwise its machine code alone was left
                tags = sorted(names.get(stored.module_id, []))
                yield ModuleRecord(stored.module_id, self.owner, wasm_size, compiled_size, int(stored.used_at), tags)

    def sizes(self, module_id: str) -> tuple[int, int]:
        """Bytes of the module and of its machine code; 0 for what is not there."""
        return _size(self.wasm(module_id)), max(0, _size(self.compiled(module_id)) - DIGEST_BYTES)

    def wasm(self, module_id: str) -> Path:
        """Path of the module."""
        return self._folder / f"{module_id}.wasm"

    def compiled(self, module_id: str) -> Path:
        """Path of the machine code."""
        return self._folder / f"{module_id}.elf"


def all_owners(folder: Path) -> Iterator[OwnerFiles]:
    """All owners below ``folder``.  Raises ``OSError``."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        owner = _name_in(path)
        if owner is None or _folder_name(owner) != path.name:
            warn_once(path, f"{path} is ignored: it does not say whose modules it has; remove it")
        else:
            yield OwnerFiles(folder, owner)


def _folder_name(owner: str) -> str:
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _name_in(folder: Path) -> str | None:
    try:
        return read_text(folder / _NAME)
    except (OSError, ValueError):
        return None


def _files_of(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Files of a folder.  Raises ``OSError``."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
