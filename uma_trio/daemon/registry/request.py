"""A client's request until it is answered, the wait for its model included."""

from __future__ import annotations

import attrs
import trio

from uma_trio.daemon.registry.registry import ModelRegistry
from uma_trio.daemon.service import Answering, send_cancelled
from uma_trio.daemon.serving.sequence import EventSink
from uma_trio.principal import Principal
from uma_trio.protocol.answers import ModelState
from uma_trio.protocol.events import LoadProgress
from uma_trio.protocol.requests import Embed, Generate, Rerank


@attrs.define(eq=False)
class ModelRequest:
    """One request of a client until it is answered, the wait for its model included."""

    _models: ModelRegistry
    request: Generate | Embed | Rerank
    _principal: Principal
    _sink: EventSink
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _running: Answering | None = attrs.field(default=None, init=False)

    @property
    def is_answered(self) -> bool:
        """Whether its last event has been sent, although ``run`` has perhaps not returned yet."""
        return self._running is not None and self._running.is_answered

    def cancel(self) -> None:
        """End the request: the cancel event of the protocol."""
        self._scope.cancel()

    def wake(self) -> None:
        """The sink has room again."""
        if self._running is not None:
            self._running.service.wake()

    async def run(self) -> None:
        """Serve the request until its last event has gone to the sink.

        Raises:
            UmaError: the request was refused, and nothing was sent.
        """
        began = trio.current_time()
        request = self.request
        has_session = isinstance(request, Generate) and request.session_id is not None
        on_wait = self._tell if isinstance(request, Generate) and request.progress else None
        try:
            with self._scope:
                async with self._models.use(
                    request.model, self._principal.name, session=has_session, on_wait=on_wait
                ) as service:
                    self._running = service.answering(
                        request, self._principal, self._sink, began=began, scope=self._scope
                    )
                    await self._running.run()
        finally:
            if self._running is None and self._scope.cancel_called:
                send_cancelled(request, self._sink, began)

    def _tell(self, model: str, state: ModelState, progress: float) -> None:
        self._sink.send(LoadProgress(id=self.request.id or "", model=model, state=state, progress=round(progress, 3)))
