"""Unloads models when their last request has ended."""

from __future__ import annotations

import structlog
import trio

from uma_trio.registry.catalog import Catalog
from uma_trio.registry.model import Instance, Model

log = structlog.get_logger("uma_trio.registry")


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
        await instance.service.wait_idle()
        with trio.move_on_after(self._save_s):
            await instance.service.save_everything()
        instance.scope.cancel()
        await instance.closed.wait()
        model.draining.discard(instance)
        model.unloads += 1
        log.info("unloaded a model", model=model.name)
        self._catalog.forget_if_unused(model)
        self._catalog.announce()
