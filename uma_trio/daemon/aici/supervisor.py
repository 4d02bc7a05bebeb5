"""Keeps a runtime of controllers alive: started when the first request needs it, and again whenever it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import structlog
import trio

from uma_trio.aici.controllers import NAMES, shipped
from uma_trio.aici_link.messages import (
    Auth,
    Empty,
    GetModules,
    GetTags,
    Instantiate,
    MakeModule,
    MidAnswer,
    MidOp,
    MidProcess,
    ModuleInfo,
    ModuleList,
    ModuleRecord,
    PostOp,
    PostPreAnswer,
    PostPreProcess,
    PreOp,
    Removal,
    Removed,
    SetTags,
    TagInfo,
    TagList,
)
from uma_trio.aici_link.shared_memory import remove_stale
from uma_trio.daemon.aici.exchange import AnswerCheck, Exchange, MidResults, PostPreResults
from uma_trio.daemon.aici.link import RuntimeDied, RuntimeLink, RuntimeStart
from uma_trio.engine_link.masks import MaskFile
from uma_trio.errors import ControllerFailed, ControllerNotFound, ControllerUnavailable
from uma_trio.processes.backoff import Backoff

T = TypeVar("T")

log = structlog.get_logger("uma_trio.aici")

STEADY_S: Final = 10.0
"""A runtime that has run for this time counts as working, so the next one is started at once."""
PATIENCE_S: Final = 2.0
"""A request waits for a runtime that is to be started within this time."""

US: Final = Auth("uma-trio", is_admin=True)
"""Who tags the controllers that come with uma-trio."""


class SupervisedRuntime:
    """See ``ControllerRuntime``.  ``run`` must have been started.

    Args:
        start: how to start a runtime.
        max_tokens: the longest text of one sequence.
    """

    def __init__(self, start: RuntimeStart, *, max_tokens: int) -> None:
        self._start = start
        self._check = AnswerCheck(start.n_vocab, start.settings.max_forks, max_tokens)
        self._limit_s = start.settings.step_ms / 1e3
        self._link: RuntimeLink | None = None
        self._missing: set[str] = set()
        """Controllers that come with uma-trio and that the runtime does not have yet: a request that names one tries again."""
        self._wanted = trio.Event()
        """Somebody needs a runtime."""
        self._attempt = trio.Event()
        """Set when the attempt to start a runtime that is next, or under way, has succeeded or failed."""
        self._backoff = Backoff()
        self._next_start_at = 0.0
        self.is_usable = False
        self.reason = "it is not needed yet"
        self.generation = 0
        self.restarts = 0
        self.masks: MaskFile | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_unused: Callable[[str], None] = lambda req_id: None

    async def run(self) -> None:
        """Keep a runtime alive until cancelled."""
        removed = await trio.to_thread.run_sync(remove_stale)
        if removed:
            log.info("removed shared memory of processes that were killed", names=len(removed))
        while True:
            await self._wanted.wait()
            await trio.sleep_until(self._next_start_at)
            await self._run_one()
            log.error("the runtime of controllers has ended", reason=self.reason, next_in_s=self._backoff.wait_s)
            self.restarts += 1

    async def _run_one(self) -> None:
        """Start a runtime, and wait for its end."""
        try:
            link = await RuntimeLink.launch(self._start)
        except OSError as error:
            self._ended(f"it cannot be started: {error}", worked=False)
            return
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            try:
                await self._prepare(link)
                self._began(link)
                await link.ended.wait()
            except RuntimeDied as death:
                link.kill(str(death))
            finally:
                is_steady = trio.current_time() - began > STEADY_S or link.was_killed
                self._ended(link.reason or "the daemon ends", worked=is_steady)

    async def _prepare(self, link: RuntimeLink) -> None:
        """Shake hands, and see to it that the controllers that come with uma-trio are there.

        Raises:
            RuntimeDied: it cannot be used.
        """
        await link.shake_hands()
        self._missing = {*NAMES}
        for name in NAMES:
            try:
                await self._add_shipped(link, name)
            except (ControllerFailed, ControllerNotFound, ControllerUnavailable, OSError) as error:
                if link.reason:
                    raise RuntimeDied(link.reason) from None
                log.error("a controller that comes with uma-trio cannot be used now", name=name, reason=str(error))

    async def _add_shipped(self, link: RuntimeLink, name: str) -> None:
        """See to it that the runtime has a controller that comes with uma-trio.  Our own runtime has all.

        Raises:
            ControllerFailed, ControllerNotFound, ControllerUnavailable: it cannot be added now.
            OSError: the controller cannot be read.
        """
        wasm = (await trio.to_thread.run_sync(shipped))[name]
        module_id = hashlib.sha256(wasm).hexdigest()
        tags = (await link.call(GetTags(), TagList, US)).tags
        if not any((info.tag, info.module_id) == (name, module_id) for info in tags):
            info = await link.call(MakeModule(wasm), ModuleInfo, US)
            await link.call(SetTags(info.module_id, [name]), TagList, US)
        self._missing.discard(name)

    def _began(self, link: RuntimeLink) -> None:
        self._link, self.masks = link, link.masks
        self.generation += 1
        self.is_usable, self.reason = True, ""
        self._attempt.set()
        log.info("the runtime of controllers runs", pid=link.pid)
        self.on_change()

    def _ended(self, reason: str, *, worked: bool) -> None:
        """There is no runtime now.

        Args:
            worked: start the next one at once.
        """
        was_usable, self.is_usable = self.is_usable, False
        self._link, self.masks, self.reason = None, None, reason
        self._next_start_at = trio.current_time() + self._backoff.after(worked=worked)
        self._attempt.set()
        self._attempt = trio.Event()
        if was_usable:
            self.on_change()
        else:
            self._wanted = trio.Event()  # the next request tries again

    # -- main channel ---------------------------------------------------------------------------

    def post_pre(self, post: Sequence[PostOp], pre: Sequence[PreOp], freed: Sequence[int]) -> Exchange[PostPreResults]:
        """See ``ControllerRuntime``."""
        request = PostPreProcess([*post], [*pre], [*freed])
        post_ids, pre_ids = [op.id for op in post], [op.id for op in pre]
        return self._exchange(request, PostPreAnswer, lambda reply: self._check.post_pre(reply, post_ids, pre_ids))

    def mid(self, ops: Sequence[MidOp]) -> Exchange[MidResults]:
        """See ``ControllerRuntime``."""
        ids = [op.id for op in ops]
        return self._exchange(MidProcess([*ops]), MidAnswer, lambda reply: self._check.mid(reply, ids))

    def _exchange(
        self, request: PostPreProcess | MidProcess, kind: type[T], check: Callable[[T], Any]
    ) -> Exchange[Any]:
        exchange: Exchange[Any] = Exchange()
        if self._link is None:
            exchange.finish(failure=self.reason)
            return exchange
        self._link.exchange(
            request,
            kind,
            self._limit_s,
            lambda reply: exchange.finish(check(reply)),
            lambda reason: exchange.finish(failure=reason),
        )
        return exchange

    # -- side channel ---------------------------------------------------------------------------

    async def instantiate(
        self, req_id: str, module: str, argument: Any, prompt: Sequence[int], auth: Auth | None = None
    ) -> int:
        """See ``ControllerRuntime``."""
        link = await self._running()
        generation = self.generation

        def late() -> None:
            if self.generation == generation:
                self.on_unused(req_id)

        if module in self._missing:
            await self._add_shipped(link, module)
        request = Instantiate(req_id, [*prompt], module, argument)
        await link.call(request, Empty, auth, self._start.settings.init_ms / 1e3, late)
        return generation

    async def make_module(self, wasm: bytes | bytearray, auth: Auth | None = None) -> ModuleInfo:
        """See ``ControllerRuntime``."""
        return await (await self._running()).call(MakeModule(cast(bytes, wasm)), ModuleInfo, auth)

    async def set_tags(self, module_id: str, tags: Sequence[str], auth: Auth | None = None) -> list[TagInfo]:
        """See ``ControllerRuntime``.  The tags of controllers that come with uma-trio stay theirs."""
        if taken := sorted({*tags} & {*NAMES}):
            raise ControllerFailed(
                f"{taken[0]} is a controller that comes with uma-trio; choose another tag", field="tags"
            )
        return (await (await self._running()).call(SetTags(module_id, [*tags]), TagList, auth)).tags

    async def get_tags(self, auth: Auth | None = None) -> list[TagInfo]:
        """See ``ControllerRuntime``."""
        return (await (await self._running()).call(GetTags(), TagList, auth)).tags

    async def get_modules(self, owner: str | None = None, auth: Auth | None = None) -> list[ModuleRecord]:
        """See ``ControllerRuntime``."""
        return (await (await self._running()).call(GetModules(owner), ModuleList, auth)).modules

    async def remove(self, removal: Removal, auth: Auth | None = None) -> list[str]:
        """See ``ControllerRuntime``."""
        return (await (await self._running()).call(removal, Removed, auth)).names

    async def _running(self) -> RuntimeLink:
        """The runtime, which is started if there is none.

        Raises:
            ControllerUnavailable: it cannot be started, or it has failed so often that this is a matter of time.
        """
        if self._link is None and self._next_start_at <= trio.current_time() + PATIENCE_S:
            self._wanted.set()
            await self._attempt.wait()
        if self._link is None:
            raise ControllerUnavailable(f"there is no runtime of controllers: {self.reason}")
        return self._link

    # -- how it is ------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        usage = self._link.usage() if self._link is not None else {}
        return {"pid": self._link.pid if self._link else None, "restarts_total": self.restarts, **usage}
