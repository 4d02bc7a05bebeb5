"""One request of a client until it is answered, the wait for its model included."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import attrs
import numpy as np
import structlog
import trio

from uma_trio.aici_link.messages import Auth
from uma_trio.daemon.prompts.prompt import Prompt, check_max_tokens
from uma_trio.daemon.registry import ModelRegistry
from uma_trio.daemon.service import ModelService
from uma_trio.daemon.serving.answer import Answer, EventSink, State
from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.serving.controllers.state import ControlledRequest
from uma_trio.daemon.serving.embedding import PendingEmbeddings, PendingRanking, cancelled
from uma_trio.daemon.serving.request import PreparedRequest, check_embeds, check_generates, check_ranks
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.serving.stats import log_request
from uma_trio.daemon.sessions import SessionTurn
from uma_trio.errors import (
    BadRequest,
    ControllerUnavailable,
    DeadlineMissed,
    DecodeFailed,
    RequestTimeout,
    ShuttingDown,
    UmaError,
)
from uma_trio.grammar.calls import AnswerShape
from uma_trio.principal import Principal
from uma_trio.protocol.answers import ModelState
from uma_trio.protocol.chat import NamedTool
from uma_trio.protocol.events import Eos, LoadProgress
from uma_trio.protocol.requests import Constraint, Embed, Generate, PoolingRequest, Rerank
from uma_trio.protocol.usage import Timings, Usage

log = structlog.get_logger("uma_trio.daemon.requests")

NO_USAGE: Final = Usage(prompt_tokens=0, completion_tokens=0)


@attrs.define(eq=False, slots=False)
class ModelRequest:
    """One request of a client; what all kinds have in common."""

    _models: ModelRegistry
    request: Generate | PoolingRequest
    _principal: Principal
    _sink: EventSink
    _began: float = attrs.field(factory=trio.current_time, init=False)
    """When it came, on trio's clock."""
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _service: ModelService | None = attrs.field(default=None, init=False)
    """The service of its model; ``None`` before that is loaded."""
    _answers: Sequence[Answer | PendingEmbeddings] = attrs.field(default=(), init=False)
    """What the scheduler makes for it."""
    _is_submitted: bool = attrs.field(default=False, init=False)

    @property
    def is_answered(self) -> bool:
        """Whether its last event has been sent, although ``run`` has perhaps not returned yet."""
        return bool(self._answers) and all(answer.done.is_set() for answer in self._answers)

    def cancel(self) -> None:
        """End the request: the cancel event of the protocol."""
        self._scope.cancel()

    def wake(self) -> None:
        """The sink has room again."""
        if self._service is not None:
            self._service.scheduler.wake()

    async def run(self) -> None:
        """Serve the request until its last event has gone to the sink.

        A cancel and the request timeout end it the same way: the last event says why, and the KV cells are free when the
        step in flight is complete.  A request that is cancelled before it is submitted has done nothing.

        Raises:
            UmaError: the request was refused, and nothing was sent.
        """
        with self._scope:
            try:
                async with self._use() as service:
                    self._service = service
                    if service.is_draining:
                        raise ShuttingDown()
                    self.request = service.with_named_adapter(self.request)
                    await self._serve(service)
            except trio.Cancelled:
                if not self._is_submitted and trio.current_time() < self._scope.deadline:
                    self._send_cancelled()
                raise

    def _use(self) -> AbstractAsyncContextManager[ModelService]:
        """The service of its model, when that is loaded."""
        return self._models.use(self.request.model, self._principal.name)

    async def _serve(self, service: ModelService) -> None:
        raise NotImplementedError

    def _send_cancelled(self) -> None:
        """Send the last events of a request that was not submitted."""
        raise NotImplementedError

    def _cancel(self, scheduler: Scheduler, reason: UmaError | None) -> None:
        """End the answers that have not ended, with ``reason`` or as cancelled."""
        raise NotImplementedError

    async def _wait(self, service: ModelService, answers: Sequence[Answer | PendingEmbeddings]) -> None:
        """Wait for ``answers`` as long as a request may take; then end those that are left, with the reason."""
        self._answers, self._is_submitted, self._scope.deadline = answers, True, math.inf
        ending: UmaError | None = None
        limit_s = service.limits.request_timeout_s
        try:
            with trio.move_on_at(self._began + limit_s) as timer:
                await self._wait_for_ends(service.scheduler)
            if timer.cancelled_caught:
                ending = RequestTimeout(f"not done after {limit_s:g} s")
        finally:
            if service.is_draining and not self._scope.cancel_called:
                ending = ShuttingDown()
            self._cancel(service.scheduler, ending)

    async def _wait_for_ends(self, scheduler: Scheduler) -> None:
        for answer in self._answers:  # a controller may add some meanwhile
            await answer.done.wait()


class Generation(ModelRequest):
    """A request for text."""

    request: Generate
    record: AnswerRecord | None = None
    """Keeps the answer, if it is detached."""
    _answers: Sequence[Answer]

    @property
    def _deadline_at(self) -> float:
        """When the answer is to be complete, on trio's clock."""
        deadline_ms = self.request.deadline_ms
        return math.inf if deadline_ms is None else self._began + deadline_ms / 1e3

    def _late(self) -> DeadlineMissed:
        message = f"the answer had not begun after deadline_ms {self.request.deadline_ms}"
        return DeadlineMissed(message, field="deadline_ms")

    async def run(self) -> None:
        """See ``ModelRequest.run``.  The deadline ends a request that was not submitted until then."""
        self._scope.deadline = self._deadline_at
        await super().run()
        if self._scope.cancelled_caught and not self._is_submitted and trio.current_time() >= self._scope.deadline:
            raise self._late()

    def _use(self) -> AbstractAsyncContextManager[ModelService]:
        request = self.request
        on_wait = self._tell if request.progress else None
        return self._models.use(
            request.model, self._principal.name, session=request.session_id is not None, on_wait=on_wait
        )

    def _tell(self, model: str, state: ModelState, progress: float) -> None:
        self._sink.send(LoadProgress(id=self.request.id or "", model=model, state=state, progress=round(progress, 3)))

    def _cancel(self, scheduler: Scheduler, reason: UmaError | None) -> None:
        for answer in self._answers:
            scheduler.cancel(answer, reason or "cancelled")

    async def _wait_for_ends(self, scheduler: Scheduler) -> None:
        with trio.move_on_at(self._deadline_at):
            await super()._wait_for_ends(scheduler)
        if trio.current_time() >= self._deadline_at:
            for answer in self._answers:
                if not answer.tokens:
                    scheduler.cancel(answer, self._late())
        await super()._wait_for_ends(scheduler)

    async def _serve(self, service: ModelService) -> None:
        check_generates(service.scheduler.info)
        if self.request.controller is not None:
            await self._serve_controlled(service, self.request.controller)
            return
        if self.record is not None:
            await self.record.begin_attempt()
        _check_session_fields(self.request)
        if self.request.client_state is not None and not self.request.detached:
            raise BadRequest("client_state is for detached answers: send it with detached", field="client_state")
        sessions, principal = service.sessions, self._principal.name
        if sessions.does_without(self.request, principal) or sessions.has_turn(self.request, principal, self._turns):
            self.request = attrs.evolve(self.request, session_id=None)
        if self.request.session_id is None:
            prompt = await service.prompts.make(self.request, principal=principal)
            await self._stream(service, self._recorded(prompt, service), self._sink)
        else:
            turn = await sessions.begin(self.request, principal, self._sink, self.record)
            try:
                turn.prompt = self._recorded(turn.prompt, service, turn.session.record.n_turns)
                await self._stream(service, turn.prompt, turn)
            finally:
                await self._end_turn(service, turn)

    @property
    def _turns(self) -> int | None:
        """How many turns the session had when the answer was begun, if an earlier daemon did that."""
        return None if self.record is None else self.record.turns

    def _recorded(self, prompt: Prompt, service: ModelService, turns: int = 0) -> Prompt:
        """The prompt that the answer was begun with.

        Raises:
            DecodeFailed: it has pictures, and their rows would be elsewhere in the prompt that an earlier daemon has kept.
        """
        if self.record is None:
            return prompt
        rendered, prompt = prompt, self.record.begin(prompt, service.content, turns)
        if prompt.media and not np.array_equal(prompt.tokens, rendered.tokens):
            raise DecodeFailed("the chat template renders the messages differently than when the answer was begun")
        if prompt.reasoning_limit is None and any(change.ends_reasoning for change in self.record.changes):
            prompt = attrs.evolve(prompt, reasoning_limit=service.prompts.reasoning_end(prompt, self.request))
        return prompt

    async def _serve_controlled(self, service: ModelService, controller: str) -> None:
        """Serve a request whose controller makes the answer."""
        if service.runtime is None:
            raise ControllerUnavailable("this daemon runs no controllers")
        prompt, name = service.prompts.start(), secrets.token_hex(16)
        generation = await service.runtime.instantiate(
            name,
            controller,
            self.request.controller_arg,
            prompt.tokens.tolist(),
            Auth(self._principal.name),
        )
        await self._stream(service, prompt, self._sink, ControlledRequest(name=name, generation=generation))

    async def _stream(
        self, service: ModelService, prompt: Prompt, sink: EventSink, controlled: ControlledRequest | None = None
    ) -> None:
        shape = _answer_shape(self.request, prompt)
        grammar = None if shape is None else await service.compile(shape, self._principal)
        scheduler = service.scheduler
        answers = scheduler.submit(
            PreparedRequest(
                request=self.request,
                prompt=prompt,
                sink=sink,
                principal=self._principal,
                grammar=grammar,
                controlled=controlled,
                record=self.record,
                deadline_at=self._deadline_at,
            )
        )
        if self.record is not None and answers[0].state is State.WAITING:
            self.record.pause()
        log.debug("accepted", id=self.request.id, prompt_tokens=len(prompt.tokens))
        await self._wait(service, answers)

    async def _end_turn(self, service: ModelService, turn: SessionTurn) -> None:
        """The last event of a session's turn follows when the turn is on disk."""
        answers, self._answers = self._answers, ()  # finished, but not answered yet
        with trio.CancelScope(shield=True):
            last = await service.sessions.end(turn, answers[0] if answers else None)
        if last is not None:
            self._sink.send(last)

    def _send_cancelled(self) -> None:
        request = self.request
        has_index = request.n > 1 or request.controller is not None
        model = request.model or "" if self._service is None else self._service.name
        waited_ms = round(1e3 * (trio.current_time() - self._began), 3)
        timings = Timings(queue_ms=waited_ms, ttft_ms=None, total_ms=waited_ms, tokens_per_s=None)
        for index in range(request.n) if has_index else (None,):
            log_request(request, model, "cancelled", NO_USAGE, timings, index=index)
            self._sink.send(
                Eos(
                    id=request.id,
                    index=index,
                    reason="cancelled",
                    usage=NO_USAGE,
                    timings=timings,
                    metadata=request.metadata,
                )
            )


class Pooling(ModelRequest):
    """A request for a result of each of its texts; what all kinds have in common."""

    request: PoolingRequest
    _answers: Sequence[PendingEmbeddings]

    async def _pending(self, service: ModelService) -> PendingEmbeddings:
        """What the scheduler is to compute.

        Raises:
            UmaError: the model cannot, or a text is too long.
        """
        raise NotImplementedError

    async def _serve(self, service: ModelService) -> None:
        pending = await self._pending(service)
        service.scheduler.embed(pending)
        try:
            await self._wait(service, [pending])
        finally:
            log.info(
                pending.done_word,
                id=self.request.id,
                model=service.name,
                texts=pending.n_done,
                tokens=pending.n_tokens,
                total_ms=round(1e3 * (trio.current_time() - self._began), 1),
            )

    def _cancel(self, scheduler: Scheduler, reason: UmaError | None) -> None:
        for pending in self._answers:
            scheduler.cancel_embedding(pending, reason)

    def _send_cancelled(self) -> None:
        self._sink.send(cancelled(self.request, self._began, NO_USAGE))


class Embedding(Pooling):
    """A request to embed texts."""

    request: Embed

    async def _pending(self, service: ModelService) -> PendingEmbeddings:
        info, request = service.scheduler.info, self.request
        check_embeds(info, request.dimensions)
        texts = await service.prompts.texts(request, info.embedding_ctx, principal=self._principal.name)
        return PendingEmbeddings(request, texts, self._sink, self._principal, dimensions=request.dimensions)


class Ranking(Pooling):
    """A request to rank documents."""

    request: Rerank

    async def _pending(self, service: ModelService) -> PendingEmbeddings:
        info, request = service.scheduler.info, self.request
        check_ranks(info)
        texts = await service.prompts.paired_texts(request, info.embedding_ctx, principal=self._principal.name)
        return PendingRanking(request, texts, self._sink, self._principal, top_n=request.top_n)


KINDS: Final[Mapping[type, type[ModelRequest]]] = {Generate: Generation, Embed: Embedding, Rerank: Ranking}
"""What serves each kind of request."""


def _answer_shape(request: Generate, prompt: Prompt) -> Constraint | AnswerShape | None:
    """What the answer must look like; ``None``: it is free.

    Reasoning is not a part of it: a model that has to answer at once answers worse.
    """
    calling = prompt.calling
    if request.constraint is None and not (calling and request.must_call):
        return None
    has_own_start = request.constraint is not None and request.constraint.has_own_start
    if calling is None and (prompt.reasoning is None or has_own_start):
        return request.constraint
    choice = request.tool_choice
    named = [tool for tool in request.tools if isinstance(choice, NamedTool) and tool.name == choice.name]
    return AnswerShape(
        markers=None if calling is None else calling.markers,
        tools=named or request.tools,
        parallel=request.parallel_tool_calls and not named,
        text=None if calling and request.must_call else request.constraint,
        reasoning=prompt.reasoning,
        is_open=prompt.opens_reasoning,
    )


def check_without_prompt(request: Generate, service: ModelService) -> None:
    """Refuse a request that can never be served, as far as that is known without its prompt.

    Raises:
        UmaError: as from ``Generation.run``.
    """
    check_generates(service.scheduler.info)
    if request.controller is None:
        _check_session_fields(request)
        check_max_tokens(request, service.scheduler.info, service.limits)


def _check_session_fields(request: Generate) -> None:
    if request.session_id is None:
        for name, given in (("drop_messages", request.drop_messages), ("history", request.history != "continue")):
            if given:
                raise BadRequest(f"{name} is for the messages of a session: send it with a session_id", field=name)
    elif request.drop_messages and request.history == "replace":
        raise BadRequest(
            "drop_messages does not go with history 'replace', which replaces all messages", field="drop_messages"
        )
