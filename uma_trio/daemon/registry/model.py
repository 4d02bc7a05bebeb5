"""A model that can be served: its settings, the copies of it that are loaded, and the load that is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import attrs
import trio

from uma_trio.config import Config
from uma_trio.daemon.registry.room import Needs
from uma_trio.daemon.service import ModelService
from uma_trio.models.packaged import model_path
from uma_trio.protocol.answers import ModelDescription, ModelState


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A model that can be served."""

    name: str
    config: Config
    """All settings that it is served with; ``config.model.model`` is a path."""
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    """Never unloaded to make room, nor because it is idle."""
    at_start: bool = True
    """Loaded with the daemon."""
    idle_unload_s: float = 0.0
    """Unloaded when it was not used for this time; 0: never."""
    is_configured: bool = True
    """Otherwise a request has found it on this machine."""
    storage: str | None = None
    """Makes the name of its storage differ from that of another model with the same content."""

    @property
    def path(self) -> Path:
        """Its file, without links."""
        return model_path(self.config.model.model).resolve()


class OpenModel(Protocol):
    """A model that is loaded."""

    @property
    def service(self) -> ModelService: ...
    @property
    def memory_bytes(self) -> int:
        """What it takes: weights and KV cache."""

    @property
    def storage_name(self) -> str:
        """Where its sessions are.  Only one copy of a model can have them open."""

    async def open_storage(self) -> None:
        """Load its sessions, and keep new ones.  It stays open until the model is closed."""


class ModelOpener(Protocol):
    """Loads models."""

    budget_bytes: int
    """Memory for all models together; 0 if it is not known yet."""
    budget_is_set: bool
    """It is a setting, and not a share of the machine's memory."""
    n_threads: int
    """Compute threads for all models together."""
    on_demand: bool | None
    """Whether models that are not configured are loaded; ``None``: only for the user who runs the daemon."""

    def open(
        self,
        spec: ModelSpec,
        room_bytes: int,
        on_progress: Callable[[float], None],
        should_continue: Callable[[], bool],
    ) -> AbstractAsyncContextManager[OpenModel | None]:
        """Load a model, which is closed at the end of the context; ``None`` if ``should_continue`` has said so.

        Args:
            room_bytes: the model gets so little context that it takes this much of the budget at most; 0 is no bound.

        Raises:
            ErrorWithRemedy: it cannot be loaded.
        """

    async def needs(self, spec: ModelSpec) -> Needs:
        """What a model takes that was not loaded yet."""

    async def describe(self, spec: ModelSpec) -> ModelDescription:
        """What its file says about a model that is not loaded."""

    async def find(self, name: str) -> ModelSpec | None:
        """What ``name`` means among the models of this machine; ``None``: nothing."""

    async def installed(self) -> list[ModelSpec]:
        """All that are loaded on demand."""


class Instance:
    """One loaded copy of a model.

    Args:
        scope: of its task; cancelled when nothing uses it.
        nursery: for what ends with it.
        on_change: called when it becomes used or unused.
    """

    def __init__(
        self,
        spec: ModelSpec,
        opened: OpenModel,
        scope: trio.CancelScope,
        nursery: trio.Nursery,
        on_change: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.opened = opened
        self.service = opened.service
        self.scope = scope
        self.nursery = nursery
        self.has_storage = False
        """Requests of sessions can be served."""
        self.closed = trio.Event()
        """Set when its engine has ended."""
        self.n_leases = 0
        self.users: set[str] = set()
        """Names of the principals that have used it."""
        self.loaded_at = self.used_at = trio.current_time()
        """When its last lease ended."""
        self.changed = trio.Event()
        """Set when it becomes used or unused."""
        self._on_change = on_change

    @contextlib.contextmanager
    def lease(self, principal: str) -> Iterator[ModelService]:
        """Keep it loaded for a request of ``principal``."""
        self.users.add(principal)
        self.n_leases += 1
        if self.n_leases == 1:
            self._announce()
        try:
            yield self.service
        finally:
            self.n_leases -= 1
            if not self.n_leases:
                self.used_at = trio.current_time()
                self._announce()

    def _announce(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
        self._on_change()

    async def wait_unused(self) -> None:
        """Wait until it has no lease."""
        while self.n_leases:
            await self.changed.wait()


class Attempt:
    """A load that is under way.

    Args:
        is_wanted: somebody wants the model, also if no request waits for it.
        on_progress: called with the loaded share in [0, 1].
        should_continue: asked now and then; False gives up.
        is_start: the daemon ends if it fails, and says why.
    """

    def __init__(
        self,
        *,
        is_wanted: bool = False,
        is_start: bool = False,
        on_progress: Callable[[float], None] | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> None:
        self.is_wanted = is_wanted
        self.is_start = is_start
        self.on_progress = on_progress
        self.should_continue = should_continue
        self.progress = 0.0
        self.done = trio.Event()
        self.cause: Exception | None = None
        """Why there is no model; ``None`` after success."""


class Model:
    """A name, and what is behind it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.instance: Instance | None = None
        """Gets the requests."""
        self.attempt: Attempt | None = None
        self.draining: set[Instance] = set()
        """Still serve what they have accepted."""
        self.failure: Exception | None = None
        self.failed_at = 0.0
        self.n_waiting = 0
        self.is_removed = False
        self.description: ModelDescription | None = None
        self.memory_bytes: int | None = None
        """Memory of the model when it was last loaded; ``None`` if it had less context than it wants."""
        self.loads = self.unloads = self.evictions = self.failures = 0

    @property
    def state(self) -> ModelState:
        if self.instance is not None:
            return "ready"
        if self.attempt is not None:
            return "loading"
        if self.draining:
            return "draining"
        return "unloaded" if self.failure is None else "failed"

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def instances(self) -> list[Instance]:
        return [*([self.instance] if self.instance is not None else []), *self.draining]

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        instance = self.instance
        is_idle = instance is not None and not instance.n_leases
        return {
            "state": self.state,
            "class": "pinned" if self.spec.pinned else "normal",
            "waiting": self.n_waiting,
            "in_use": 0 if instance is None else instance.n_leases,
            "idle_s": round(trio.current_time() - instance.used_at, 1) if instance is not None and is_idle else None,
            "memory_bytes": None if instance is None else instance.opened.memory_bytes,
            "loads_total": self.loads,
            "load_failures_total": self.failures,
            "unloads_total": self.unloads,
            "evictions_total": self.evictions,
        }
