"""Modules and their tags: those that come with uma-trio, in memory, and those that were uploaded, on disk.

::

    owners/HASH/     the modules and tags of one owner: nobody else sees them (store_files.py)
    shared/          tags that administrators have set: everybody sees them
    shipped/         machine code of the controllers that come with uma-trio, so that each start need not compile them
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from uma_trio.aici.runtime.interface import TURN_SECONDS, CannotCompile
from uma_trio.aici.runtime.module_space import NoRoom, Space, StoredModule, to_remove
from uma_trio.aici.runtime.shipped_modules import ShippedModules
from uma_trio.aici.runtime.store_files import (
    MODULE_ID,
    OwnedTag,
    OwnerFiles,
    TagFiles,
    all_owners,
    load_or_compile,
    warn_once,
)
from uma_trio.aici_link.messages import Auth, ModuleInfo, ModuleRecord, TagInfo
from uma_trio.protocol.controllers import TAG_RULE, is_tag

if TYPE_CHECKING:  # the store needs no engine
    from uma_trio.aici.runtime.host import Module, WasmHost

log = logging.getLogger(__name__)

FOLDER: Final = "cache"
"""Relative to the working directory, as in the reference implementation."""
_KNOWN: Final = {"owners", "shared", "shipped", "lock"}

MAX_LOADED: Final = 32
"""The most recently used modules stay in memory."""

MAX_TAGS: Final = 1000
"""Tags of one owner, and tags that administrators share."""
MAX_LISTED: Final = 10_000
"""Modules in a list of those of all owners."""

LOCK_S: Final = 5.0
"""Longest wait for another runtime that changes the same folder."""
LOCK_POLL_S: Final = 0.02


class StoreError(Exception):
    """The store refuses a module or a tag.  The message has the reason and the remedy."""


class ModuleStore:
    """The modules of a folder.  Thread-safe; several processes may use the folder.

    Users own what they upload: only they list it, run it and give it tags.  Tags of administrators are for everybody.

    Args:
        folder: made when it is needed.  Compiled code is read from it only if no other user can write to it.
        shipped: the controllers that come with uma-trio, by name: everybody has them, also without the folder.
    """

    def __init__(self, folder: Path, host: WasmHost, space: Space, shipped: Mapping[str, bytes]) -> None:
        self._folder = folder
        self._host = host
        self._space = space
        self._shipped = ShippedModules(shipped, host, folder / "shipped")
        self._shared = TagFiles(folder / "shared")
        self._lock = threading.Lock()
        self._module_locks: weakref.WeakValueDictionary[tuple[str, str], threading.Lock] = weakref.WeakValueDictionary()
        self._change_lock = threading.Lock()
        """Held while the folder changes, with the file ``lock``."""
        self._loaded: OrderedDict[tuple[str, str], Module] = OrderedDict()
        if unknown := sorted({*_names_in(folder)} - _KNOWN):
            log.warning(
                "%s has %d files that this version does not know, such as %s; they are ignored and can be removed",
                folder,
                len(unknown),
                unknown[0],
            )

    # -- modules ----------------------------------------------------------------------------------

    def add(self, wasm: bytes, auth: Auth) -> ModuleInfo:
        """Compile and keep a module for its owner.

        Raises:
            BadModule: it is not Wasm, or no controller.
            CannotCompile: it cannot be compiled now.
            StoreError: there is no room for it.
            OSError: it cannot be written.
        """
        module_id = hashlib.sha256(wasm).hexdigest()
        started = time.monotonic()
        if self._shipped.has(module_id):
            self._shipped.open(module_id)
            compiled_size = self._shipped.compiled_size(module_id)
        else:
            files = self._files(auth.user)
            with self._module_lock(files, module_id):
                if files.is_whole(module_id):
                    _note_use(files, module_id)
                else:
                    self._keep(files, module_id, wasm, self._host.compile(wasm), auth)
                compiled_size = files.sizes(module_id)[1]
        return ModuleInfo(module_id, len(wasm), compiled_size, int((time.monotonic() - started) * 1000))

    def open(self, name: str, auth: Auth) -> Module:
        """The module with an id or a tag.

        Raises:
            StoreError: the user has none of this name, or it is damaged.
            BadModule, CannotCompile: it cannot be compiled again.
            OSError: it cannot be read.
        """
        if name.startswith("gh:"):
            raise StoreError(f"{name}: this runtime downloads nothing; upload the module")
        module_id, files = self._resolve(name, auth)
        if files is None:
            return self._shipped.open(module_id)
        key = files.owner, module_id
        with self._module_lock(files, module_id):
            module = self._loaded.get(key)
            if module is None:
                module = self._load(files, module_id)
            _note_use(files, module_id)
            with self._lock:
                self._loaded[key] = module
                self._loaded.move_to_end(key)
                while len(self._loaded) > MAX_LOADED:
                    self._loaded.popitem(last=False)
        return module

    def modules(self, auth: Auth, owner: str | None = None) -> list[ModuleRecord]:
        """The modules of ``owner``, the most recently used first.  ``None``: the user's, and for administrators all.

        Raises:
            StoreError: they are somebody else's.
        """
        wants_all = owner is None and auth.is_admin
        owners = self._owners() if wants_all else [self._files(_owner(auth, owner))]
        shared = self._shared.all()
        records = [record for files in owners for record in files.records(shared)]
        return sorted(records, key=lambda record: (-record.used_at, record.module_id))[:MAX_LISTED]

    def remove_module(self, module_id: str, auth: Auth, owner: str | None = None) -> list[str]:
        """Remove a module of ``owner``, and its tags; returns the names that are gone.  What runs goes on.

        Args:
            owner: ``None``: the user's own.

        Raises:
            StoreError: it is not there, or somebody else's.
            CannotCompile: it is being compiled.
            OSError: it cannot be removed.
        """
        files = self._files(_owner(auth, owner))
        if self._shipped.has(module_id):
            raise StoreError("this controller comes with uma-trio; it cannot be deleted")
        if not MODULE_ID.fullmatch(module_id) or not files.has(module_id):
            raise StoreError(f"module {module_id} not found{_among(files.owner, owner)}")
        with self._module_lock(files, module_id), self._changing():
            gone = [module_id]
            for tags in (files.tags, self._shared):
                for tag in tags.all():
                    if tag.module_id == module_id and tag.owner == files.owner:
                        tags.remove(tag.tag)
                        gone.append(tag.tag)
            self._remove(files, module_id)
        return gone

    # -- tags -------------------------------------------------------------------------------------

    def set_tags(self, module_id: str, tags: Sequence[str], auth: Auth) -> list[TagInfo]:
        """Let ``tags`` mean a module: for the user, and if that is an administrator, for everybody.

        Raises:
            StoreError: a tag is not allowed, there are too many, or the user has no such module.
            OSError: they cannot be written.
        """
        for tag in tags:
            self._check_tag(tag)
        if not MODULE_ID.fullmatch(module_id):
            raise StoreError("invalid module_id")
        files = self._find(module_id, auth.user)
        sizes = self._shipped.sizes(module_id) if files is None else files.sizes(module_id)
        place = self._shared if auth.is_admin else self._files(auth.user).tags
        owner = auth.user if files is None else files.owner
        new_tags = [OwnedTag(tag, module_id, int(time.time()), auth.user, *sizes, owner) for tag in tags]
        with self._changing():
            known = {*place.names()}
            new = {*tags} - known
            if new and len(known) + len(new) > MAX_TAGS:
                raise StoreError(f"there are {len(known)} tags, at most {MAX_TAGS} are possible; delete some")
            if files is not None and not files.has(module_id):
                raise StoreError(f"module {module_id} not found; it was deleted")
            place.write(new_tags)
        return [tag.info for tag in new_tags]

    def tags(self, auth: Auth) -> list[TagInfo]:
        """The tags that the user can run, the last updated one first."""
        by_name = {
            owned.tag: owned.info for place in (self._shared, self._files(auth.user).tags) for owned in place.all()
        }
        by_name |= {info.tag: info for info in self._shipped.tags()}
        return sorted(by_name.values(), key=lambda info: (-info.updated_at, info.tag))

    def remove_tags(self, tags: Sequence[str], auth: Auth, owner: str | None = None) -> list[str]:
        """Remove tags of ``owner``, all or none; returns them.

        Args:
            owner: ``None``: the user's own, and for administrators also those for everybody.

        Raises:
            StoreError: one of them is not there, or somebody else's.
            OSError: they cannot be removed.
        """
        files = self._files(_owner(auth, owner))
        may_remove_shared = auth.is_admin and owner is None
        with self._changing():
            places = []
            for tag in tags:
                if tag in files.tags.names():
                    places.append(files.tags)
                elif tag in self._shared.names() and may_remove_shared:
                    places.append(self._shared)
                elif self._shipped.id_of(tag) is not None:
                    raise StoreError(f"{tag} is a controller that comes with uma-trio; it cannot be deleted")
                elif tag in self._shared.names():
                    raise StoreError(f"the tag {tag} is for everybody; only an administrator can delete it")
                else:
                    raise StoreError(f"tag {tag} not found{_among(files.owner, owner)}")
            for tag, place in zip(tags, places, strict=True):
                place.remove(tag)
        return [*tags]

    def _check_tag(self, tag: str) -> None:
        if not is_tag(tag):
            raise StoreError(f"{tag[:100]!r} cannot be a tag: {TAG_RULE}")
        if self._shipped.id_of(tag) is not None:
            raise StoreError(f"{tag} is a controller that comes with uma-trio; choose another tag")

    # -- which module is meant --------------------------------------------------------------------

    def _files(self, owner: str) -> OwnerFiles:
        return OwnerFiles(self._folder / "owners", owner)

    def _owners(self) -> list[OwnerFiles]:
        return [*all_owners(self._folder / "owners")]

    def _resolve(self, name: str, auth: Auth) -> tuple[str, OwnerFiles | None]:
        """Id and place of a module; without a place, it comes with uma-trio."""
        if MODULE_ID.fullmatch(name):
            return name, self._find(name, auth.user)
        if not is_tag(name):
            raise StoreError("invalid module_id")
        if (shipped := self._shipped.id_of(name)) is not None:
            return shipped, None
        if (own := self._files(auth.user).tags.find(name)) is not None:
            return own.module_id, self._find(own.module_id, auth.user)
        if (shared := self._shared.find(name)) is None:
            close = difflib.get_close_matches(name, [info.tag for info in self.tags(auth)], n=1)
            raise StoreError(f"tag {name} not found{f'; did you mean {close[0]}?' if close else ''}")
        return shared.module_id, self._find(shared.module_id, shared.owner)

    def _find(self, module_id: str, user: str) -> OwnerFiles | None:
        """The files of the owner of a module that the user may run; ``None`` if it comes with uma-trio."""
        if self._shipped.has(module_id):
            return None
        files = self._files(user)
        if files.has(module_id):
            return files
        for tag in self._shared.all():
            if tag.module_id == module_id and (files := self._files(tag.owner)).has(module_id):
                return files
        raise StoreError(f"module {module_id} not found; upload it first")

    # -- loading and room -------------------------------------------------------------------------

    def _load(self, files: OwnerFiles, module_id: str) -> Module:
        def compiled() -> bytes:
            try:
                wasm = files.read(module_id)
            except FileNotFoundError:
                raise StoreError(f"module {module_id} not found; upload it first") from None
            if wasm is None:
                raise StoreError(f"the file of module {module_id} is damaged; upload it again")
            return self._host.compile(wasm)

        return load_or_compile(files.compiled(module_id), module_id, self._host, compiled)

    def _keep(self, files: OwnerFiles, module_id: str, wasm: bytes, compiled: bytes, auth: Auth) -> None:
        """Write a module; remove modules without a tag if it needs their space.

        Raises:
            StoreError, OSError: as ``add``.
        """
        space = attrs.evolve(self._space, max_owner_bytes=self._space.max_bytes) if auth.is_admin else self._space
        with self._changing():
            others = [
                other for other in self._all_stored() if (other.owner, other.module_id) != (files.owner, module_id)
            ]
            try:
                leaving = to_remove(others, files.owner, len(wasm) + len(compiled), space)
            except NoRoom as refusal:
                raise StoreError(str(refusal)) from None
            for module in leaving:
                log.info("removed module %s: it has no tag, and another module needs the space", module.module_id)
                self._remove(self._files(module.owner), module.module_id)
            files.write(module_id, wasm, compiled)
            with self._lock:
                self._loaded.pop((files.owner, module_id), None)

    def _all_stored(self) -> Iterator[StoredModule]:
        shared = {(tag.owner, tag.module_id) for tag in self._shared.all()}
        for files in self._owners():
            try:
                for module in files.stored():
                    yield attrs.evolve(module, has_tag=module.has_tag or (module.owner, module.module_id) in shared)
            except OSError as error:
                warn_once(files.wasm(""), f"the modules of {files.owner} cannot be read: {error}")

    def _remove(self, files: OwnerFiles, module_id: str) -> None:
        with self._lock:
            self._loaded.pop((files.owner, module_id), None)
        files.remove(module_id)

    # -- one at a time ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _module_lock(self, files: OwnerFiles, module_id: str) -> Iterator[None]:
        """Held while a module is compiled, so that two uploads of the same module compile it once.

        Raises:
            CannotCompile: another thread compiles it, for longer than ``TURN_SECONDS``.
        """
        with self._lock:
            lock = self._module_locks.setdefault((files.owner, module_id), threading.Lock())
        if not lock.acquire(timeout=TURN_SECONDS):
            raise CannotCompile(f"module {module_id} is being compiled; try again later")
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone in changing the folder, among all threads and processes.  Raises ``OSError``."""
        with self._change_lock:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise OSError(error.errno, f"the stored modules cannot be changed: {error.strerror}") from None
            try:
                _lock_file(descriptor)
                yield
            finally:
                os.close(descriptor)


def _lock_file(descriptor: int) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise OSError(error.errno, "another runtime is changing the modules; try again") from None
            time.sleep(LOCK_POLL_S)
        else:
            return


def _owner(auth: Auth, owner: str | None) -> str:
    if owner is not None and owner != auth.user and not auth.is_admin:
        raise StoreError("only an administrator may name an owner")
    return auth.user if owner is None else owner


def _among(owner: str, named: str | None) -> str:
    return "" if named is None else f" among those of {owner}"


def _note_use(files: OwnerFiles, module_id: str) -> None:
    try:
        files.note_use(module_id)
    except OSError as error:  # a store that cannot be written can be read all the same
        log.info("cannot note that module %s was used: %s", module_id, error)


def _names_in(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.endswith(".tmp")]
    except OSError:
        return []
