"""Loads and unloads models.

Loads run one after the other, so that each finds what memory the previous load has left.  A model is unloaded when its
last request has ended.

A reload loads the new copy next to the old one if there is room, and the old one serves until the new one is ready; without
room, requests wait while the old one drains.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from uma_trio.config import MB
from uma_trio.daemon.registry.catalog import Catalog, relevant
from uma_trio.daemon.registry.model import Attempt, Instance, Model, ModelOpener
from uma_trio.daemon.registry.room import (
    Bounds,
    Evict,
    Load,
    LoadedView,
    Needs,
    Refuse,
    Wait,
    decide,
    least_recently_used,
    missing_room,
)
from uma_trio.errors import ErrorWithRemedy, ModelUnavailable, UmaError

log = structlog.get_logger("uma_trio.registry")

PROGRESS_STEP: Final = 0.05
"""Clients that wait get the progress in steps of this share."""


class _GivenUp(Exception):
    """``Attempt.should_continue`` has ended a load, or nobody waits for it."""


class Unloader:
    """Drains and closes the copies of models.

    Args:
        nursery: for the copies that drain.
        save_s: how long a model may take to save its sessions' states.
    """

    def __init__(self, catalog: Catalog, nursery: trio.Nursery, save_s: float) -> None:
        self._catalog = catalog
        self._nursery = nursery
        self._save_s = save_s

    def drain(self, model: Model, instance: Instance) -> None:
        """Give ``instance`` no more requests, and end it when it has none.  Does not wait."""
        if instance in model.draining:
            return
        model.draining.add(instance)
        if model.instance is instance:
            model.instance = None
        self._catalog.announce()
        self._nursery.start_soon(self._close_when_unused, model, instance)

    async def unload(self, model: Model, instance: Instance) -> None:
        """Wait until ``instance`` has no requests, and has ended.  It ends as well if this is cancelled."""
        self.drain(model, instance)
        while instance in model.draining:
            await self._catalog.wait_changed()

    async def evict(self, model: Model, instance: Instance, *, room_for: Model, reason: str) -> None:
        """Unload a model to make room for another one."""
        log.info("unloading a model to make room", model=model.name, room_for=room_for.name, reason=reason)
        model.evictions += 1
        await self.unload(model, instance)

    async def unload_when_idle(self, model: Model, instance: Instance) -> None:
        """Drain ``instance`` when it was not used for the time that its settings say."""
        spec = instance.spec
        while spec.idle_unload_s and not spec.pinned:
            await instance.wait_unused()
            with trio.move_on_at(instance.used_at + spec.idle_unload_s):
                await instance.changed.wait()
                continue
            if model.instance is instance and model.attempt is None:
                log.info("unloading a model that nobody uses", model=model.name, idle_s=spec.idle_unload_s)
                self.drain(model, instance)
            return

    async def _close_when_unused(self, model: Model, instance: Instance) -> None:
        await instance.wait_unused()
        await instance.service.scheduler.wait_idle()
        with trio.move_on_after(self._save_s):
            await instance.service.save_everything()
        instance.scope.cancel()
        await instance.closed.wait()
        model.draining.discard(instance)
        model.unloads += 1
        log.info("unloaded a model", model=model.name)
        self._catalog.forget_if_unused(model)
        self._catalog.announce()


class Loader:
    """Loads models, and makes room for them.

    Args:
        nursery: for loads, and for the models that are loaded.
        max_loaded: models at a time; 0: any number.
    """

    def __init__(
        self, catalog: Catalog, opener: ModelOpener, unloader: Unloader, nursery: trio.Nursery, max_loaded: int
    ) -> None:
        self._catalog = catalog
        self._opener = opener
        self._unloader = unloader
        self._nursery = nursery
        self._max_loaded = max_loaded
        self._loading = trio.Lock()
        self._served: set[trio.CancelScope] = set()
        """Tasks of loaded models, which end only by themselves."""
        self._is_draining = False

    def begin(self, model: Model, attempt: Attempt) -> Attempt:
        """Load ``model`` in a task of its own, and return ``attempt``, which says when that is done."""
        model.attempt = attempt
        self._nursery.start_soon(self._load, model, attempt)
        return attempt

    def drain(self) -> None:
        """Give up loads that are under way or begin later."""
        self._is_draining = True

    def close(self) -> None:
        """End all models at once."""
        self._is_draining = True
        for scope in self._served:
            scope.cancel()

    async def has_room(self, model: Model) -> bool:
        """Whether ``model`` can be loaded next to those that are loaded."""
        needs = await self._needs(model)
        return missing_room(needs.whole, self._loaded_now(), self._bounds()) is None

    async def _load(self, model: Model, attempt: Attempt) -> None:
        """Load a model, or load it again next to the copy that serves now."""
        old = model.instance
        try:
            async with self._loading:
                if old is not None and not await self.has_room(model):
                    await self._unloader.unload(model, old)
                    old = None
                room = await self._make_room(model, attempt, next_to=old)
                new = await self._open(model, attempt, room, next_to=old)
                try:
                    if not self._shares_storage(new):
                        await self._open_storage(new)
                except BaseException:
                    new.scope.cancel()
                    raise
        except _GivenUp as error:
            attempt.cause = error
        except (ErrorWithRemedy, UmaError, OSError) as error:
            attempt.cause = error
            model.failures += 1
            if model.instance is None:
                model.failure, model.failed_at = error, trio.current_time()
            if not attempt.is_start:
                log.error("a model cannot be loaded", model=model.name, reason=str(error))
        else:
            if model.instance is not None:  # it could also have been unloaded to make room for the new copy
                self._unloader.drain(model, model.instance)
            model.instance, model.failure = new, None
            model.loads += 1
            if not new.has_storage:
                new.nursery.start_soon(self._take_storage, new)
        finally:
            model.attempt = None
            attempt.done.set()
            self._catalog.announce()
        if model.is_removed and model.instance is not None:
            self._unloader.drain(model, model.instance)
        elif attempt.cause is None and relevant(new.spec) != relevant(model.spec):
            self.begin(model, Attempt(is_wanted=True))  # the settings have changed meanwhile

    async def _make_room(self, model: Model, attempt: Attempt, *, next_to: Instance | None) -> Load:
        """Unload models until there is room; returns how much.

        Args:
            next_to: the copy that it replaces.

        Raises:
            ModelUnavailable: what is loaded is pinned.
            _GivenUp: nobody waits any more.
        """
        needs, began = await self._needs(model), trio.current_time()
        while True:
            pairs = self._pairs()
            loaded = self._loaded_now(next_to)
            step = decide(needs, loaded, self._bounds(), began=began, now=trio.current_time())
            is_wanted = attempt.is_wanted or model.n_waiting
            if not isinstance(step, Load) and (self._is_draining or not is_wanted):
                raise _GivenUp("nobody waits for it any more")
            match step:
                case Load():
                    return step
                case Wait(until):
                    with trio.move_on_at(until):
                        await self._catalog.wait_changed()
                case Evict(index, reason):
                    await self._unloader.evict(*pairs[index], room_for=model, reason=reason)
                case Refuse(reason):
                    raise ModelUnavailable(f"there is no room for the model {model.name}: {reason}")

    async def _open(self, model: Model, attempt: Attempt, room: Load, *, next_to: Instance | None) -> Instance:
        """Load a model; if that takes more memory than was thought, unload others and try again.

        Args:
            next_to: the copy that it replaces, which is the last one to go.

        Raises:
            ErrorWithRemedy: it cannot be loaded.
        """
        if not attempt.is_start:
            room_mb = {"room_mb": room.room_bytes // MB} if room.room_bytes else {}
            log.info("loading a model", model=model.name, **room_mb)
        while True:
            try:
                instance: Instance = await self._nursery.start(self._serve, model, attempt, room.room_bytes)
                break
            except ErrorWithRemedy as error:
                if not error.is_about_memory:
                    raise
                if unused := self._unused(except_for=next_to):
                    await self._unloader.evict(*unused, room_for=model, reason=str(error))
                elif next_to is not None and next_to is model.instance:
                    await self._unloader.unload(model, next_to)
                else:
                    raise
        model.memory_bytes = None if room.room_bytes else instance.opened.memory_bytes
        model.description = instance.service.description()
        return instance

    async def _serve(
        self, model: Model, attempt: Attempt, room_bytes: int, task_status: trio.TaskStatus[Instance]
    ) -> None:
        """Load a model and serve it until its scope is cancelled."""
        spec, instance = model.spec, None

        def on_progress(share: float) -> None:
            if attempt.on_progress is not None:
                attempt.on_progress(share)
            if share >= min(1.0, attempt.progress + PROGRESS_STEP):
                attempt.progress = share
                self._catalog.announce()

        def should_continue() -> bool:
            return attempt.should_continue() and not self._is_draining

        scope = trio.CancelScope()
        try:
            with scope:
                async with self._opener.open(spec, room_bytes, on_progress, should_continue) as opened:
                    if opened is None:
                        raise _GivenUp("loading was given up")
                    async with trio.open_nursery() as nursery:
                        with trio.CancelScope(shield=True):  # a cancelled start would wait for the task forever
                            await nursery.start(opened.service.run)
                        instance = Instance(spec, opened, scope, nursery, self._catalog.announce)
                        scope.shield = True
                        self._served.add(scope)
                        nursery.start_soon(self._unloader.unload_when_idle, model, instance)
                        task_status.started(instance)
        finally:
            self._served.discard(scope)
            if instance is not None:
                instance.closed.set()

    async def _open_storage(self, instance: Instance) -> None:
        await instance.opened.open_storage()
        instance.has_storage = True

    def _shares_storage(self, new: Instance) -> bool:
        """Whether another copy has the sessions of this one open."""
        others = [instance for instance in self._catalog.instances() if instance is not new]
        return any(instance.opened.storage_name == new.opened.storage_name for instance in others)

    async def _take_storage(self, new: Instance) -> None:
        """Open the sessions of ``new`` when the copy that has them is closed."""
        while self._shares_storage(new):
            await self._catalog.wait_changed()
        await self._open_storage(new)
        self._catalog.announce()

    # -- what is loaded ---------------------------------------------------------------------------

    async def _needs(self, model: Model) -> Needs:
        needs = await self._opener.needs(model.spec)
        if model.memory_bytes is None:
            return needs
        return Needs(whole=model.memory_bytes, least=min(needs.least, model.memory_bytes))

    def _bounds(self) -> Bounds:
        return Bounds(
            budget_bytes=self._opener.budget_bytes,
            budget_is_set=self._opener.budget_is_set,
            max_loaded=self._max_loaded,
        )

    def _pairs(self) -> list[tuple[Model, Instance]]:
        return [(model, instance) for model in self._catalog.all() for instance in model.instances]

    def _loaded_now(self, next_to: Instance | None = None) -> list[LoadedView]:
        """What is loaded, in the order of ``_pairs``."""
        return [
            LoadedView(
                name=model.name,
                memory_bytes=instance.opened.memory_bytes,
                is_leaving=instance in model.draining,
                stays=model.spec.pinned or instance is next_to,
                # requests that wait for a model have no lease in the moment in which it is ready
                is_used=bool(instance.n_leases or model.n_waiting),
                used_at=instance.used_at,
                loaded_at=instance.loaded_at,
            )
            for model, instance in self._pairs()
        ]

    def _unused(self, *, except_for: Instance | None) -> tuple[Model, Instance] | None:
        """The model that nobody uses, and was used least recently; ``None`` if all are in use or pinned."""
        index = least_recently_used(self._loaded_now(except_for))
        return None if index is None else self._pairs()[index]
