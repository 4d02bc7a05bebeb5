"""Which models are loaded, who waits for which, and what makes room for the next one.

A request that names a model which is not loaded has it loaded, and waits; all requests for a model share one load.
Models are loaded one after the other, so that each finds what memory the previous load has left.

What a model is in use for is counted in leases: a model is unloaded when its last lease has ended, so unloading never
ends a request.  A reload loads the new copy next to the old one if there is room, and the old one serves until the new one
is ready; without room, requests wait while the old one drains.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

import attrs
import structlog
import trio

from uma_trio.config import Config
from uma_trio.daemon.registry import sharing
from uma_trio.daemon.registry.catalog import Catalog
from uma_trio.daemon.registry.loader import Loader, Unloader
from uma_trio.daemon.registry.model import Attempt, Instance, Model, ModelOpener, ModelSpec
from uma_trio.daemon.service import ModelService
from uma_trio.daemon.serving.answer import Answer
from uma_trio.errors import (
    AnswerNotFound,
    BadRequest,
    ModelLoading,
    ModelUnavailable,
    QueueFull,
    ShuttingDown,
    UmaError,
)
from uma_trio.protocol.answers import HealthCheck, ModelDescription, ModelState
from uma_trio.protocol.lease import SessionOffer

log = structlog.get_logger("uma_trio.registry")

FAILURE_KEPT_S: Final = 5.0
"""Requests that come within this time after a failed load get its error, and do not load again."""
RETRY_MS: Final = 5000
"""When a request that waited in vain may be sent again."""

OnWait = Callable[[str, ModelState, float], None]
"""Gets the name and the state of a model that a request waits for, and the loaded share in [0, 1]."""


class ModelRegistry:
    """The models by name.  The first one is the default.

    Args:
        specs: those that are configured.
        opener: loads them, and finds others.
        config: says what all models may have together.
        owner: name of the principal that runs the daemon.
    """

    def __init__(self, specs: Iterable[ModelSpec], opener: ModelOpener, config: Config, owner: str = "") -> None:
        self._config = config
        self._opener = opener
        self._catalog = Catalog(specs, opener, owner)
        self._loader: Loader
        self._unloader: Unloader
        self._draining = False

    # -- running ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Models can be loaded until the end of the context, which ends all engines at once."""
        async with trio.open_nursery() as nursery:
            self._unloader = Unloader(self._catalog, nursery, self._config.limits.drain_timeout_s)
            max_loaded = self._config.loading.max_loaded_models
            self._loader = Loader(self._catalog, self._opener, self._unloader, nursery, max_loaded)
            nursery.start_soon(sharing.share_threads, self._catalog, self._opener.n_threads)
            try:
                yield
            finally:
                self._draining = True
                self._loader.close()
                nursery.cancel_scope.cancel()

    async def start(self, on_progress: Callable[[float], None] | None, should_continue: Callable[[], bool]) -> bool:
        """Load the models that are to be loaded at the start, while there is room for them.

        Args:
            on_progress: called with the loaded share of the first one, in [0, 1].
            should_continue: asked now and then; False gives up.

        Returns:
            Whether it was not given up.

        Raises:
            ErrorWithRemedy, UmaError: a model cannot be loaded.
        """
        for index, model in enumerate(self._catalog.models):
            if not (model.spec.at_start or model.spec.pinned):
                continue
            if index and not await self._loader.has_room(model):
                log.warning("a model is not loaded at the start: there is no room for it", model=model.name)
                continue
            attempt = self._loader.begin(
                model,
                Attempt(
                    is_wanted=True,
                    is_start=True,
                    on_progress=on_progress if index == 0 else None,
                    should_continue=should_continue,
                ),
            )
            await attempt.done.wait()
            if not should_continue():
                return False
            if attempt.cause is not None:
                raise attempt.cause
        return True

    def drain(self) -> None:
        """Accept no more requests; those that were accepted go on, and those that wait for a model are refused."""
        self._draining = True
        self._loader.drain()
        for instance in self._catalog.instances():
            instance.service.drain()
        self._catalog.announce()

    def next_offer(self) -> SessionOffer | None:
        """The next session of any loaded model that another daemon may take over, each once; ``None`` without one."""
        for instance in self._catalog.instances():
            service = instance.service
            if (session := service.sessions.hand_over.next_offer()) is not None:
                return SessionOffer(
                    session_id=session.record.key.id, principal=session.record.key.principal, model=service.name
                )
        return None

    def stop(self) -> None:
        """End all requests and engines at once."""
        self.drain()
        for instance in self._catalog.instances():
            instance.service.stop()

    async def wait_idle(self) -> None:
        """Wait until no model has a request."""
        for instance in self._catalog.instances():
            await instance.service.scheduler.wait_idle()

    async def save_everything(self) -> None:
        """Bring the sessions and their KV states to disk."""
        for instance in self._catalog.instances():
            await instance.service.save_everything()

    # -- requests ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(
        self, name: str | None, principal: str, *, session: bool = False, on_wait: OnWait | None = None
    ) -> AsyncIterator[ModelService]:
        """Have a model loaded, and keep it loaded until the end of the context.

        Args:
            name: as requests spell it; ``None`` is the default model.
            principal: name of the principal that uses the model.
            session: whether the copy must have the sessions of the model; a copy that replaces another gets them last.
            on_wait: called at the start of a wait, and with its progress.

        Raises:
            ModelNotFound: there is no such model; the message names the models that there are.
            QueueFull, ModelLoading: too many wait for it, or it takes too long.
            ModelUnavailable: it cannot be loaded.
            ShuttingDown: the daemon is draining.
        """
        model = await self._catalog.find(name, principal)
        instance = model.instance
        if instance is None or (session and not instance.has_storage):
            instance = await self._wait_for(model, session=session, on_wait=on_wait)
        with instance.lease(principal) as service:
            yield service

    def loaded(self, name: str | None = None) -> ModelService | None:
        """A model's service, if it is loaded.

        Raises:
            ModelNotFound: there is no such model.
        """
        model = self._catalog.named(name)
        if model is None:
            remedy = "choose one of these, or load another one first, with: uma-trio models load NAME"
            raise self._catalog.not_found(str(name), remedy=remedy)
        return None if model.instance is None else model.instance.service

    async def _wait_for(self, model: Model, *, session: bool, on_wait: OnWait | None) -> Instance:
        if model.n_waiting >= self._config.limits.max_queue:
            message = f"{model.n_waiting} requests wait for the model {model.name} to be loaded"
            raise QueueFull(message, retry_after_ms=RETRY_MS)
        reported: tuple[ModelState, float] | None = None
        wait_s = self._config.loading.load_wait_s
        model.n_waiting += 1
        try:
            with trio.move_on_after(wait_s):
                while True:
                    instance = model.instance
                    if self._draining:
                        raise ShuttingDown()
                    if instance is not None and (instance.has_storage or not session):
                        return instance
                    if model.is_removed:
                        raise self._catalog.not_found(model.name)
                    attempt = None if instance is not None else self._attempt(model)
                    progress = 1.0 if attempt is None else attempt.progress
                    state: ModelState = "draining" if model.draining else "loading"
                    if on_wait is not None and reported != (state, progress):
                        reported = state, progress
                        on_wait(model.name, *reported)
                    await self._catalog.wait_changed()
                    if attempt is not None and attempt.done.is_set() and attempt.cause is not None:
                        raise _unavailable(model, attempt.cause)
        finally:
            model.n_waiting -= 1
        message = f"the model {model.name} was not ready within {wait_s:g} s: {self._why(model)}"
        raise ModelLoading(message, retry_after_ms=RETRY_MS)

    def _why(self, model: Model) -> str:
        """Why a request still waits."""
        if model.attempt is not None and model.attempt.progress > 0:
            return f"{model.attempt.progress:.0%} of it are loaded"
        busy = [other.name for other in self._catalog.all() for instance in other.instances if instance.n_leases]
        return f"requests of {', '.join(busy)} keep the memory" if busy else "other models are loaded before it"

    def _attempt(self, model: Model) -> Attempt:
        """The load that is under way, or a new one, unless one has just failed."""
        if model.attempt is not None:
            return model.attempt
        if model.failure is not None and trio.current_time() < model.failed_at + FAILURE_KEPT_S:
            raise _unavailable(model, model.failure)
        return self._loader.begin(model, Attempt())

    # -- administration ---------------------------------------------------------------------------

    async def load(self, name: str) -> ModelDescription:
        """Load a model, if it is not loaded.

        Raises:
            UmaError: it cannot be loaded.
        """
        model = await self._catalog.find(name)
        if model.instance is None:
            await self._loaded(model, model.attempt or self._loader.begin(model, Attempt(is_wanted=True)))
        return await self._description(model)

    async def unload(self, name: str) -> ModelDescription:
        """Unload a model when its requests have ended; its next request loads it again.

        Raises:
            UmaError: there is no such model.
        """
        model = await self._catalog.find(name)
        if model.attempt is not None:
            await model.attempt.done.wait()
        if model.instance is not None:
            await self._unloader.unload(model, model.instance)
        while model.draining:
            await self._catalog.wait_changed()
        return await self._description(model)

    async def release(self, name: str, principal: str) -> ModelDescription:
        """Unload a model for ``principal``, if nobody else has used it since it was loaded.

        A model that is in use, waited for or pinned stays.

        Raises:
            UmaError: there is no such model.
        """
        model = await self._catalog.find(name, principal)
        current = model.instance
        is_used = model.n_waiting or model.attempt or any(instance.n_leases for instance in model.instances)
        if is_used or (current is not None and (current.spec.pinned or current.users - {principal})):
            return await self._description(model)
        return await self.unload(name)

    async def reload(self, name: str) -> ModelDescription:
        """Load a model again, with its file and its settings as they are now.  No request is dropped.

        Raises:
            UmaError: it cannot be loaded.  The copy that was loaded goes on, if there was room for both.
        """
        model = await self._catalog.find(name)
        if model.attempt is not None:
            await model.attempt.done.wait()
        await self._loaded(model, model.attempt or self._loader.begin(model, Attempt(is_wanted=True)))
        return await self._description(model)

    def update(self, specs: Iterable[ModelSpec]) -> None:
        """Take over what is configured now: add, remove and reload models.  Does not wait; failures are logged."""
        gone, to_load = self._catalog.update(specs)
        for model in gone:
            for instance in model.instances:
                self._unloader.drain(model, instance)
        self._catalog.announce()
        for model in to_load:
            if model.attempt is None:
                self._loader.begin(model, Attempt(is_wanted=True))

    async def _loaded(self, model: Model, attempt: Attempt) -> None:
        attempt.is_wanted = True
        await attempt.done.wait()
        if attempt.cause is not None:
            raise _unavailable(model, attempt.cause)

    # -- how they are -----------------------------------------------------------------------------

    async def descriptions(self, principal: str | None = None) -> list[ModelDescription]:
        """Describe all models that a principal may name, including models of this machine that a request would load.

        The default model is the first one.

        Args:
            principal: its name; ``None`` is the owner of the daemon.
        """
        models = self._catalog.models_for(principal)
        known = [await self._description(model) for model in models]
        names, paths = {model.name for model in models}, {model.spec.path for model in models}
        installed = await self._opener.installed() if self._catalog.may_load(principal) else []
        others = [spec for spec in installed if spec.path not in paths and spec.name not in names]
        return [*known, *[await self._installed(spec) for spec in others]]

    async def _installed(self, spec: ModelSpec) -> ModelDescription:
        return attrs.evolve(await self._opener.describe(spec), path=str(spec.path))

    async def describe(self, name: str, principal: str | None = None) -> ModelDescription:
        """The model with this name or alias.

        Raises:
            ModelNotFound: there is none; the message says how to serve one of this machine.
        """
        return await self._description(await self._catalog.find(name, principal))

    async def _description(self, model: Model) -> ModelDescription:
        if model.description is None:
            model.description = await self._opener.describe(model.spec)
        instance, unloads_in_s = model.instance, None
        if instance is not None and instance.spec.idle_unload_s and not instance.spec.pinned:
            idle_s = 0.0 if instance.n_leases else trio.current_time() - instance.used_at
            unloads_in_s = round(max(0.0, instance.spec.idle_unload_s - idle_s), 1)
        return attrs.evolve(
            model.description,
            state=model.state,
            progress=None if model.attempt is None else round(model.attempt.progress, 3),
            reason=None if model.state != "failed" else str(model.failure),
            aliases=[*model.spec.aliases],
            pinned=model.spec.pinned,
            memory_bytes=None if instance is None else instance.opened.memory_bytes,
            path=str(model.spec.path),
            unloads_in_s=unloads_in_s,
        )

    @property
    def names(self) -> list[str]:
        """All names, the default one first."""
        return [model.name for model in self._catalog.models]

    @property
    def has_chat_template(self) -> bool:
        """Whether the default model can have chats; also while it is not loaded."""
        default = self._catalog.models[0]
        return default.description is None or "chat" in default.description.capabilities

    def answer_of(self, request_id: str, principal: str) -> tuple[ModelService, Answer]:
        """The running answer of a request of ``principal``, and the service that makes it.

        Raises:
            AnswerNotFound: there is none.
            BadRequest: there are several.
        """
        services = [model.instance.service for model in self._catalog.models if model.instance is not None]
        answers = [(service, answer) for service in services for answer in service.answers_of(request_id, principal)]
        if not answers:
            raise AnswerNotFound(
                f"you have no running answer {request_id!r}: it has ended, has not begun, or belongs to another principal",
                field="request_id",
            )
        if len(answers) > 1:
            raise BadRequest(
                f"{len(answers)} answers run as {request_id!r}: give each request an id of its own, and n 1",
                field="request_id",
            )
        return answers[0]

    def watched(self, name: str | None) -> ModelService | None:
        """The service of a model, if it is loaded; ``None`` is the default model, or the first one that is loaded.

        Raises:
            ModelNotFound: there is no such model.
        """
        if name is not None:
            return self.loaded(name)
        loaded = [model.instance for model in self._catalog.models if model.instance is not None]
        return loaded[0].service if loaded else None

    def health(self) -> list[HealthCheck]:
        """Whether the models can serve another request now.  One that is loaded when it is needed is no problem."""
        checks = []
        for model in self._catalog.models:
            if model.instance is not None:
                checks += model.instance.service.health()
                continue
            reason = {
                "loading": "it is being loaded",
                "draining": "it is being unloaded",
                "failed": f"it cannot be loaded: {model.failure}",
            }.get(model.state, "not loaded; the next request loads it")
            is_missed = model.spec.pinned or (model.state == "failed" and model.spec.is_configured)
            checks.append(HealthCheck(name="model", ok=not is_missed, reason=reason, model=model.name))
        return checks

    def snapshot(self, name: str | None = None) -> dict[str, Any]:
        """Numbers for the metrics: those of one model, and ``models`` with those of all.

        Args:
            name: which one; see ``watched``.

        Raises:
            ModelNotFound: there is no such model.
        """
        watched = self.watched(name)
        nothing = {
            "model": name or self.names[0],
            "running": 0,
            "queue_depth": 0,
            "requests_total": {},
            "tokens_total": 0,
        }
        models = {}
        for model in self._catalog.models:
            models[model.name] = model.snapshot()
            if model.instance is not None and model.instance.service is not watched:
                models[model.name]["metrics"] = model.instance.service.snapshot()
        return {**(nothing if watched is None else watched.snapshot()), "models": models}


def _unavailable(model: Model, cause: Exception) -> UmaError:
    """The error of a request whose model cannot be loaded."""
    is_said = isinstance(cause, ModelUnavailable)
    message = str(cause) if is_said else f"the model {model.name} cannot be loaded: {cause}"
    return ModelUnavailable(message, retry_after_ms=RETRY_MS)
