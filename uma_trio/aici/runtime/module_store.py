"""Modules on disk: Wasm, compiled code and tags, all of which survive a restart."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import os
import re
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import msgspec

from uma_trio.aici.messages import Auth, ModuleInfo, TagInfo
from uma_trio.aici.runtime.interface import Host, Module
from uma_trio.aici.runtime.module_space import NoRoom, StoredModule, to_remove
from uma_trio.files import read_text, replace_text
from uma_trio.protocol.controllers import MAX_TAG_CHARACTERS, is_tag

log = logging.getLogger(__name__)

FOLDER: Final = "cache"
"""Relative to the working directory, as in the reference implementation."""

MAX_LOADED: Final = 32
"""The most recently used modules stay in memory."""

MAX_TAGS: Final = 10_000
MAX_TAGS_OF_USER: Final = 1000
"""Tags of one user who is not an administrator, so that nobody takes those of all others."""
_ID: Final = re.compile(r"[0-9a-f]{64}")
_LOOKS_HEX: Final = re.compile(r"[0-9a-fA-F]{21,}")


DEFAULT_MAX_MIB: Final = 1024
"""All modules together, with their compiled code."""

ABANDONED_S: Final = 3600.0
"""A file that was begun so long ago, and is not whole, belongs to a process that was killed."""

DIGEST_BYTES: Final = 32
"""Behind compiled code stands its SHA-256: code that the disk has damaged must not run."""


class StoreError(Exception):
    """The store cannot do it; says why.  The one who chose the module or the tag can fix it."""


class ModuleStore:
    """The modules of a folder.  Thread-safe.

    Args:
        folder: made when it is needed.  Compiled code is read from it only if no other user can write to it.
        max_mib: what modules may take on disk.  To make room, the least recently used modules
            without a tag are removed first.
    """

    def __init__(self, folder: Path, host: Host, max_mib: int = DEFAULT_MAX_MIB) -> None:
        self._folder = folder
        self._host = host
        self._max_bytes = max_mib << 20
        self._lock = threading.Lock()
        self._of_module: weakref.WeakValueDictionary[str, _ModuleLock] = weakref.WeakValueDictionary()
        self._tags_lock = threading.Lock()
        self._room_lock = threading.Lock()
        """Held while a module is written, and others leave for it."""
        self._loaded: OrderedDict[str, Module] = OrderedDict()

    def add(self, wasm: bytes, auth: Auth) -> ModuleInfo:
        """Compile and keep a module.

        Raises:
            BadModule: it is none.
            StoreError: there is no room for it among those that have tags.
            OSError: it cannot be written.
        """
        module_id = hashlib.sha256(wasm).hexdigest()
        started = time.monotonic()
        with self._module_lock(module_id):
            compiled_size = self._compiled_size(module_id)
            if compiled_size is None:
                compiled = self._host.compile(wasm)
                compiled_size = len(compiled)
                about = {"created": int(time.time()), "auth": msgspec.to_builtins(auth)}
                self._keep(module_id, wasm, compiled, msgspec.json.encode(about).decode())
            else:
                self._note_use(module_id)
        duration_ms = int((time.monotonic() - started) * 1000)
        return ModuleInfo(module_id, len(wasm), compiled_size, duration_ms)

    def open(self, name: str) -> Module:
        """The module with an id or a tag.

        Raises:
            StoreError: there is none.
            BadModule: it cannot be compiled any more.
        """
        module_id = self._resolve(name)
        with self._module_lock(module_id):
            module = self._loaded.get(module_id)
            if module is None:
                module = self._load(module_id)
        self._note_use(module_id)
        with self._lock:
            self._loaded[module_id] = module
            self._loaded.move_to_end(module_id)
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
        return module

    def set_tags(self, module_id: str, tags: list[str], auth: Auth) -> list[TagInfo]:
        """Let ``tags`` mean a module.

        Raises:
            StoreError: a tag is not allowed, or there is no such module.
        """
        if not _ID.fullmatch(module_id):
            raise StoreError("invalid module_id")
        for tag in tags:
            check_tag(tag, auth)
        compiled_size = self._compiled_size(module_id)
        if compiled_size is None:
            raise StoreError(f"module {module_id} not found; upload it first")
        wasm_size = self._wasm(module_id).stat().st_size
        with self._tags_lock:
            now = int(time.time())
            folder = self._make_folder("tags")
            known = [name.removesuffix(".json") for name in os.listdir(folder)]
            n_new = len({*tags} - {*known})
            n_own = sum([_owner_of(tag) == auth.user for tag in known])
            if n_new and not auth.is_admin and n_own + n_new > MAX_TAGS_OF_USER:
                raise StoreError(f"{auth.user} has {n_own} tags and may have {MAX_TAGS_OF_USER}")
            if n_new and len(known) + n_new > MAX_TAGS:
                raise StoreError(f"there are {MAX_TAGS} tags already; remove some from {folder}")
            found = [TagInfo(tag, module_id, now, auth.user, wasm_size, compiled_size) for tag in tags]
            for info in found:
                replace_text(folder / f"{info.tag}.json", msgspec.json.encode(info).decode(), new_mode=0o600)
        return found

    def tags(self) -> list[TagInfo]:
        """All tags, the last updated one first."""
        found = []
        for path in (self._folder / "tags").glob("*.json"):
            if (info := _read_tag(path)) is not None:
                found.append(info)
        return sorted(found, key=lambda info: (-info.updated_at, info.tag))

    # -- room on disk -----------------------------------------------------------------------------

    def _keep(self, module_id: str, wasm: bytes, compiled: bytes, about: str) -> None:
        """Write the files of a module, all or none.

        Raises:
            StoreError, OSError: as ``add``.
        """
        with self._room_lock:
            self._make_folder()
            self._make_room(module_id, len(wasm) + len(compiled) + DIGEST_BYTES + len(about))
            try:
                _replace(self._wasm(module_id), wasm)
                _replace(self._compiled(module_id), compiled, _digest(compiled))
                replace_text(self._about(module_id), about, new_mode=0o600)
            except OSError as error:
                self._remove(module_id)
                raise OSError(error.errno, f"the module cannot be stored: {error.strerror}") from None

    def _make_room(self, module_id: str, n_bytes: int) -> None:
        """Remove modules, so that one more has room."""
        stored = [each for each in self._stored() if each.module_id != module_id]
        tagged = {info.module_id for info in self.tags()}
        try:
            leaving = to_remove(stored, tagged, n_bytes, self._max_bytes)
        except NoRoom as refusal:
            raise StoreError(str(refusal)) from None
        for each in leaving:
            log.info("removed module %s: it has no tag, and another module needs the space", each)
            self._remove(each)

    def _stored(self) -> Iterator[StoredModule]:
        """The modules on disk."""
        sizes: dict[str, int] = {}
        used_at: dict[str, float] = {}
        for entry in os.scandir(self._folder):
            found = entry.stat(follow_symlinks=False)
            if entry.name.endswith(".tmp") and time.time() - found.st_mtime > ABANDONED_S:
                Path(entry.path).unlink(missing_ok=True)
            elif _ID.fullmatch(name := entry.name[:64]):
                sizes[name] = sizes.get(name, 0) + found.st_size
                if entry.name == f"{name}.wasm":
                    used_at[name] = found.st_mtime
        for name, n_bytes in sizes.items():
            yield StoredModule(name, n_bytes, used_at.get(name, 0.0))

    def _note_use(self, module_id: str) -> None:
        """Note a use: the least recently used modules are removed first."""
        try:
            os.utime(self._wasm(module_id))
        except OSError as error:  # it is in memory, so it can be used all the same
            log.info("cannot note that module %s was used: %s", module_id, error)

    def _remove(self, module_id: str) -> None:
        with self._lock:
            self._loaded.pop(module_id, None)
        for path in (self._wasm(module_id), self._compiled(module_id), self._about(module_id)):
            path.unlink(missing_ok=True)

    # -- files ------------------------------------------------------------------------------------

    def _resolve(self, name: str) -> str:
        if _ID.fullmatch(name):
            return name
        if name.startswith("gh:"):
            raise StoreError(f"{name}: this runtime downloads nothing; upload the module")
        if not is_tag(name):
            raise StoreError("invalid module_id")
        info = _read_tag(self._folder / "tags" / f"{name}.json")
        if info is None or not _ID.fullmatch(info.module_id):
            raise StoreError(f"tag {name} not found{self._similar(name)}")
        return info.module_id

    def _similar(self, name: str) -> str:
        """A question that names the tag that was probably meant, if there is one."""
        close = difflib.get_close_matches(name, [info.tag for info in self.tags()], n=1)
        return f"; did you mean {close[0]}?" if close else ""

    def _load(self, module_id: str) -> Module:
        if self._is_private():
            try:
                return self._host.load(_without_digest(self._compiled(module_id).read_bytes()))
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:  # compiled by another version, or damaged
                log.info("%s is compiled again: %s", module_id, error)
        try:
            wasm = self._wasm(module_id).read_bytes()
        except OSError as error:
            raise StoreError(f"module {module_id} not found: {error.strerror}; upload it first") from None
        if hashlib.sha256(wasm).hexdigest() != module_id:
            raise StoreError(f"the file of module {module_id} is damaged; upload it again")
        compiled = self._host.compile(wasm)
        if self._is_private():
            try:
                _replace(self._compiled(module_id), compiled, _digest(compiled))
            except OSError as error:
                log.warning("cannot keep the compiled module %s: %s", module_id, error)
        return self._host.load(compiled)

    def _compiled_size(self, module_id: str) -> int | None:
        """Size of the compiled module; ``None`` if the module is not whole on disk."""
        try:
            if hashlib.sha256(self._wasm(module_id).read_bytes()).hexdigest() == module_id:
                return max(0, self._compiled(module_id).stat().st_size - DIGEST_BYTES)
        except OSError:
            pass
        return None

    @contextlib.contextmanager
    def _module_lock(self, module_id: str) -> Iterator[None]:
        """Held while a module is compiled, so that two uploads of the same module compile it once."""
        with self._lock:
            found = self._of_module.setdefault(module_id, _ModuleLock())
        with found.lock:
            yield

    def _make_folder(self, name: str = "") -> Path:
        folder = self._folder / name
        self._folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _is_private(self) -> bool:
        """Compiled code runs as it is, so nobody else may have written it."""
        try:
            found = self._folder.stat()
        except OSError:
            return False
        return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def _wasm(self, module_id: str) -> Path:
        return self._folder / f"{module_id}.wasm"

    def _compiled(self, module_id: str) -> Path:
        return self._folder / f"{module_id}.elf"

    def _about(self, module_id: str) -> Path:
        return self._folder / f"{module_id}-sys.json"


def check_tag(tag: str, auth: Auth) -> None:
    """Raises ``StoreError`` if ``auth`` may not set ``tag``."""
    if len(tag) > MAX_TAG_CHARACTERS:
        raise StoreError("tag name too long")
    if _LOOKS_HEX.fullmatch(tag):
        raise StoreError("tag name looks too hex")
    if not is_tag(tag):
        raise StoreError("tag name not identifier")
    if not auth.is_admin and _owner_of(tag) != auth.user:
        raise StoreError("permission denied for tag name")


def _owner_of(tag: str) -> str:
    """The user whose tag this is.  Names of users may have dots: a tag of ``alice.b`` is none of ``alice``."""
    return tag.rpartition(".")[0]


def _read_tag(path: Path) -> TagInfo | None:
    try:
        return msgspec.json.decode(read_text(path), type=TagInfo)
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("cannot read the tag %s: %s", path, error)
        return None


@attrs.define(eq=False)
class _ModuleLock:
    lock: threading.Lock = attrs.field(factory=threading.Lock)


def _digest(compiled: bytes) -> bytes:
    return hashlib.sha256(compiled).digest()


def _without_digest(data: bytes) -> bytes:
    """Raises ``ValueError`` if the code is not whole."""
    compiled, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if _digest(compiled) != digest:
        raise ValueError("the compiled module is damaged")
    return compiled


def _replace(path: Path, *parts: bytes) -> None:
    """Write a file, or leave it as it is."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
