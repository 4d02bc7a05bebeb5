"""What a door sees of one model: a service that answers requests.

A door (the socket, a gateway) translates between its language and these calls.  It does not see the scheduler, the KV
cache or the engine.  ``uma_trio.daemon.registry`` has the services by the names of their models.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
from collections import abc
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import attrs
import structlog
import trio

from uma_trio.config import MB, Config, Sampling
from uma_trio.daemon.aici import library
from uma_trio.daemon.aici.exchange import ControllerRuntime
from uma_trio.daemon.engines.loaded import LoadedModel
from uma_trio.daemon.engines.saved_costs import save_costs
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.prompts.fair_limiter import FairLimiter
from uma_trio.daemon.prompts.prompt import Prompt, PromptMaker
from uma_trio.daemon.serving.controllers.state import ControlledRequest
from uma_trio.daemon.serving.embedding import PendingEmbeddings, cancelled
from uma_trio.daemon.serving.offload import InThread, StateFiles
from uma_trio.daemon.serving.request import check_generates, check_pooling
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.serving.sequence import EventSink, Sequence
from uma_trio.daemon.serving.stats import log_request
from uma_trio.daemon.sessions import Sessions, SessionTurn
from uma_trio.daemon.store.journal import Journal
from uma_trio.errors import BadRequest, ControllerUnavailable, RequestTimeout, ShuttingDown, UmaError
from uma_trio.grammar.calls import AnswerShape
from uma_trio.grammar.compiler import Grammar
from uma_trio.models.purpose import IN_WORDS
from uma_trio.models.sampling_defaults import sampling_defaults
from uma_trio.principal import Principal
from uma_trio.protocol.answers import (
    AdapterDescription,
    Capability,
    HealthCheck,
    ModelDescription,
    SequenceInfo,
    SessionInfo,
    SessionList,
    TokenList,
    Transcript,
    bare_name,
)
from uma_trio.protocol.chat import NamedTool
from uma_trio.protocol.controllers import Controllers, ControllersQuery
from uma_trio.protocol.events import Eos, Timings, Usage
from uma_trio.protocol.queries import SessionQuery, TokenizeQuery
from uma_trio.protocol.requests import AdapterChoice, Constraint, Embed, Generate, Rerank
from uma_trio.telemetry.perf_records import PerfSink

log = structlog.get_logger("uma_trio.daemon.service")

AnyRequest = TypeVar("AnyRequest", bound=Generate | Embed | Rerank)


class ModelService:
    """Serves one model.

    Args:
        in_thread: runs a blocking call.
        runtime: of controllers; ``None``: requests cannot have one.
    """

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        *,
        in_thread: InThread = trio.to_thread.run_sync,
        runtime: ControllerRuntime | None = None,
    ) -> None:
        self.name = model.info.served_name
        self._model = model
        self._sampling = sampling_defaults(config.sampling, model.recommended_sampling)
        values: dict[str, Any] = {name: each.value for name, each in self._sampling.items()}
        seed = config.sampling.seed
        self._defaults = {**values, **({} if seed is None else {"seed": seed})}
        config = attrs.evolve(config, sampling=Sampling(**self._defaults))
        self._limits = config.limits
        self._prompts: PromptMaker = model.prompts
        self.has_chat_template = model.prompts.chat is not None
        """Whether requests can have ``messages``."""
        self.runtime: ControllerRuntime | None = runtime
        """Runs controllers; ``None``: this daemon runs none."""
        self._scheduler = Scheduler(model.engine, model.token_to_bytes, config, model.cost, in_thread, runtime)
        self._sessions = Sessions(config, self._scheduler, model.prompts, in_thread=in_thread)
        self._in_thread = in_thread
        self._checking = FairLimiter(1)
        """One constraint is checked at a time: hostile ones wait for each other, take no more than one thread, and principals
        take turns."""
        self._draining = False

    # -- requests -------------------------------------------------------------------------------

    def answering(
        self,
        request: Generate | Embed | Rerank,
        principal: Principal,
        sink: EventSink,
        *,
        began: float,
        scope: trio.CancelScope,
    ) -> Answering:
        """A request that has not begun: see ``Answering``."""
        request = self._with_named_adapter(request)
        if isinstance(request, Generate):
            return Generation(self, request, principal, sink, began, scope)
        return Embedding(self, request, principal, sink, began, scope)

    def _with_named_adapter(self, request: AnyRequest) -> AnyRequest:
        """``request`` with the adapter that its ``model`` names, if that is ``MODEL:ADAPTER``."""
        model = request.model or self.name
        adapter = model.rpartition(":")[2]
        known = [each.name for each in self._model.info.adapters]
        if bare_name(model) == self.name or adapter not in known:
            return request
        return attrs.evolve(request, adapters=[*request.adapters, AdapterChoice(name=adapter)])

    async def answer_sessions(self, query: SessionQuery, principal: Principal) -> Iterable[SessionList | Transcript]:
        """List, describe, read, fork or close sessions of ``principal``; returns the events of the answer.

        Raises:
            SessionError: it cannot be done.
        """
        return await self._sessions.answer_query(query, principal.name)

    async def answer_controllers(
        self, query: ControllersQuery, wasm: bytes | bytearray | None, principal: Principal, *, is_admin: bool
    ) -> Iterable[Controllers]:
        """Upload, tag, list or delete controllers; returns the events of the answer.

        Args:
            wasm: the whole module of an upload.
            is_admin: whether the principal is an administrator.

        Raises:
            UmaError: it cannot be done.
        """
        if self.runtime is None:
            raise ControllerUnavailable("this daemon runs no controllers")
        return await library.answer(self.runtime, query, wasm, library.auth_of(principal, is_admin=is_admin))

    async def tokenize(self, query: TokenizeQuery, principal: str) -> TokenList:
        """Tokens of a text or of a chat, or the text of tokens.

        Raises:
            UmaError: it cannot be done; see ``PromptMaker.tokenize``.
        """
        return await self._prompts.tokenize(query, principal=principal)

    def description(self) -> ModelDescription:
        """What a client may want to know of the model."""
        info, model = self._model.info, self._model
        capabilities: dict[Capability, bool] = {
            "completion": info.purpose == "generate",
            "chat": self.has_chat_template,
            "tools": self.has_chat_template,
            "reasoning": self._prompts.reasoning is not None,
            "embedding": info.can_embed,
            "rerank": info.purpose == "rank",
        }
        return ModelDescription(
            name=self.name,
            description=info.description,
            architecture=model.metadata.get("general.architecture", "unknown"),
            quantization=quantization(info.description),
            size_bytes=info.size_bytes,
            n_parameters=info.n_params,
            context=info.n_ctx,
            context_per_request=info.max_request_tokens,
            parallel=info.n_seq_max,
            capabilities=[name for name, has in capabilities.items() if has],
            embedding_length=info.n_embd_out,
            chat_template=model.template_source,
            adapters=[
                AdapterDescription(name=each.name, scale=each.scale, rank=each.rank, size_bytes=each.size_bytes)
                for each in info.adapters
            ],
            sampling=self._defaults,
            eog_tokens=[*info.eog_ids],
            created_at=model.written_at,
        )

    # -- for the server -------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._scheduler.run)
            nursery.start_soon(self._sessions.sweep_forever)
            task_status.started()

    async def open_storage(
        self, journal: Journal | None, files: StateFiles | None = None, states: Iterable[SavedState] = ()
    ) -> None:
        """Make sessions durable, and load those of earlier runs.  ``run`` must be running.

        Args:
            journal: ``None``: sessions end with the daemon.
            files: where KV states go; ``None``: nowhere.
            states: those that are there.
        """
        if files is not None:
            self._scheduler.offloader.open(files, states)
        if journal is not None:
            await self._sessions.open(journal)

    def wake(self) -> None:
        """A sink has room again."""
        self._scheduler.wake()

    def drain(self) -> None:
        """Accept no more requests; those that were accepted go on."""
        self._draining = True
        self._scheduler.close()

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        await self._scheduler.wait_idle()

    async def save_everything(self) -> None:
        """Bring sessions and their KV states to disk.  ``run`` must be running."""
        await self._sessions.repair()
        await self._scheduler.offloader.save_everything()

    @property
    def n_threads(self) -> int:
        """Compute threads that the model has where no other model computes."""
        return self._model.info.n_threads

    def set_threads(self, n_threads: int) -> None:
        """Compute with this many threads from the next step on, because other models compute as well."""
        self._scheduler.set_threads(n_threads)

    def keep_learned_costs(self) -> None:
        """Keep what was learned of the engine's speed for the next start.  Blocks briefly."""
        self.set_threads(self.n_threads)
        save_costs(self._model.cost_name, self._scheduler.timings.cost)

    def stop(self) -> None:
        """End all requests and the engine at once."""
        self._draining = True
        self._scheduler.stop()

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; ``None`` if it runs in a thread."""
        return self._model.engine.link.pid

    def describe(self) -> dict[str, dict[str, Any]]:
        """What does not change while the model is loaded: facts by name, each with its fields."""
        info, fit, devices = self._model.info, self._model.fit, self._model.devices
        adapters = ", ".join([f"{each.name} (rank {each.rank}, scale {each.scale:g})" for each in info.adapters])
        return {
            "fit": {"choice": fit.choice, "why": fit.why} if fit is not None else {"choice": "off"},
            "model": {"model": self.name, "description": info.description, "size_mb": round(info.size_bytes / MB, 1)},
            **self._describe_context(),
            "device": {"device": str(devices), "memory": ", ".join(map(str, devices.memory))},
            **({"adapters": {"loaded": adapters}} if adapters else {}),
        }

    def _describe_context(self) -> dict[str, dict[str, Any]]:
        info = self._model.info
        if info.purpose != "generate":
            return {
                "purpose": {
                    "purpose": f"it {IN_WORDS[info.purpose]}",
                    "pooling": info.pooling,
                    "tokens_of_a_text": info.embedding_ctx,
                }
            }
        return {
            "KV cache": {"ctx": info.n_ctx, "parallel": info.n_seq_max, "ctx_per_request": info.max_request_tokens},
            "chat template": {"template": self._model.chat_template or "none"},
            "sampling defaults": {
                name: f"{each.value:g} ({each.source})"
                for name, each in self._sampling.items()
                if each.source != "built in" or name == "temperature"
            },
        }

    def health(self) -> list[HealthCheck]:
        """Whether the model can serve another request now.  Never waits for a step."""
        loaded = HealthCheck(name="model", ok=True, reason="loaded")
        return [attrs.evolve(check, model=self.name) for check in (loaded, *self._scheduler.health())]

    @contextlib.contextmanager
    def recording(self, sink: PerfSink) -> Iterator[None]:
        """Pass a record of each tick and of each request that ends on to ``sink``."""
        sinks = self._scheduler.sinks
        sinks.append(sink)
        try:
            yield
        finally:
            sinks.remove(sink)

    def sequences(self) -> list[SequenceInfo]:
        """What the KV cache holds.  Never waits for a step."""
        return self._scheduler.describe_sequences()

    def latest_sessions(self, n: int) -> list[SessionInfo]:
        """The ``n`` most recently used sessions of all principals, in that order."""
        return self._sessions.latest(n)

    def retry_after_ms(self) -> int | None:
        """When a request that was refused may be sent again, if that can be estimated."""
        return self._scheduler.retry_after_ms()

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics.  Never waits for a step."""
        return {
            **self._scheduler.snapshot(),
            "sessions": self._sessions.snapshot(),
            "constraints": self._model.grammars.snapshot(),
            "devices": {each.device: each.snapshot() for each in self._model.devices.memory},
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless the bookkeeping adds up."""
        self._scheduler.check_integrity()


@attrs.define(eq=False, slots=False)
class Answering:
    """One request of a client while a model serves it; what all kinds of requests have in common."""

    service: ModelService
    request: Generate | Embed | Rerank
    _principal: Principal
    _sink: EventSink
    _began: float
    """When it came, on trio's clock."""
    _scope: trio.CancelScope
    """In which ``run`` is called."""

    @property
    def is_answered(self) -> bool:
        """Whether its last event has been sent, although ``run`` has perhaps not returned yet."""
        raise NotImplementedError

    async def run(self) -> None:
        """Serve the request until its last event has gone to the sink.

        A cancelled scope and the request timeout end it the same way: the last event says why, and the KV cells are free
        when the step in flight is complete.

        Raises:
            UmaError: the request was refused, and nothing was sent.
        """
        if self.service._draining:
            raise ShuttingDown("the server is shutting down")
        await self._serve()

    async def _serve(self) -> None:
        raise NotImplementedError

    async def _wait(self, answers: Iterable[trio.Event], end: Callable[[UmaError | None], None]) -> None:
        """Wait for ``answers`` as long as a request may take; ``end`` then ends those that are left, with the reason."""
        ending: UmaError | None = None
        limit_s = self.service._limits.request_timeout_s
        try:
            with trio.move_on_at(self._began + limit_s) as timer:
                for answer in answers:
                    await answer.wait()
            if timer.cancelled_caught:
                ending = RequestTimeout(f"not done after {limit_s:g} s")
        finally:
            if self.service._draining and not self._scope.cancel_called:
                ending = ShuttingDown("the server is shutting down")
            end(ending)


class Generation(Answering):
    """A request for text."""

    request: Generate
    _sequences: abc.Sequence[Sequence] = ()

    @property
    def is_answered(self) -> bool:
        """See ``Answering``."""
        return bool(self._sequences) and all(sequence.done.is_set() for sequence in self._sequences)

    async def _serve(self) -> None:
        check_generates(self.service._model.info)
        if self.request.controller is not None:
            await self._steer()
            return
        _check_session_fields(self.request)
        sessions = self.service._sessions
        if sessions.does_without(self.request, self._principal.name):
            self.request = attrs.evolve(self.request, session_id=None)
        if self.request.session_id is None:
            prompt = await self._prepare(self.service._prompts.make(self.request, principal=self._principal.name))
            await self._stream(prompt, self._sink)
        else:
            turn = await self._prepare(sessions.begin(self.request, self._principal.name, self._sink))
            try:
                await self._stream(turn.prompt, turn)
            finally:
                await self._end_turn(turn)

    async def _steer(self) -> None:
        """Serve a request whose controller makes the answer."""
        service, request = self.service, self.request
        runtime = service.runtime
        if runtime is None or request.controller is None:
            raise ControllerUnavailable("this daemon runs no controllers")
        prompt, name = service._prompts.start(), secrets.token_hex(16)
        starting = runtime.instantiate(
            name,
            request.controller,
            request.controller_arg,
            prompt.tokens.tolist(),
            library.auth_of(self._principal, is_admin=False),
        )
        generation: int = await self._prepare(starting)
        await self._stream(prompt, self._sink, ControlledRequest(name=name, generation=generation))

    async def _prepare(self, making: Awaitable[Any]) -> Any:
        """Wait for what comes before the first step; a request that is cancelled meanwhile has done nothing."""
        try:
            return await making
        except trio.Cancelled:
            send_cancelled(self.request, self._sink, self._began, self.service.name)
            raise

    async def _compile(self, prompt: Prompt) -> Grammar | None:
        """The grammar of what the answer must look like, before any token is computed."""
        service = self.service
        shape = _answer_shape(self.request, prompt)
        if shape is None:
            return None
        grammars = service._model.grammars

        async def compiled() -> Grammar:
            grammar: Grammar | None = await service._in_thread(grammars.find, shape)
            if grammar is None:
                async with service._checking.of(self._principal.name):
                    grammar = await service._in_thread(grammars.compile, shape)
            return grammar

        grammar: Grammar = await self._prepare(compiled())
        return grammar

    async def _stream(self, prompt: Prompt, sink: EventSink, controlled: ControlledRequest | None = None) -> None:
        grammar = await self._compile(prompt)
        scheduler = self.service._scheduler
        durable = self.request.session_id is not None
        self._sequences = sequences = scheduler.submit(
            self.request, prompt, sink, self._principal, grammar=grammar, controlled=controlled, durable=durable
        )
        log.debug("admitted", id=self.request.id, prompt_tokens=len(prompt.tokens))

        def end(reason: UmaError | None) -> None:
            for sequence in sequences:
                scheduler.cancel(sequence, reason or "cancelled")  # does nothing to one that has finished

        await self._wait((sequence.done for sequence in sequences), end)  # a controller may add some meanwhile

    async def _end_turn(self, turn: SessionTurn) -> None:
        """The last event of a session's turn follows when the turn is on disk."""
        sequences, self._sequences = self._sequences, []  # finished, but not answered yet
        with trio.CancelScope(shield=True):
            last = await self.service._sessions.end(turn, sequences[0] if sequences else None)
        if last is not None:
            self._sink.send(last)


def send_cancelled(request: Generate | Embed | Rerank, sink: EventSink, began: float, model: str | None = None) -> None:
    """Send the last events of a request that was cancelled before its first step.

    Args:
        began: when it came, on trio's clock.
        model: that serves it; ``None`` if it was not loaded yet.
    """
    usage = Usage(prompt_tokens=0, completion_tokens=0)
    if isinstance(request, Embed | Rerank):
        sink.send(cancelled(request, began, usage))
        return
    has_index = request.n > 1 or request.controller is not None
    waited_ms = round(1e3 * (trio.current_time() - began), 3)
    timings = Timings(queue_ms=waited_ms, ttft_ms=None, total_ms=waited_ms, tokens_per_s=None)
    for index in range(request.n) if has_index else (None,):
        log_request(request, model or request.model or "", "cancelled", usage, timings, index=index)
        sink.send(
            Eos(
                id=request.id,
                index=index,
                reason="cancelled",
                usage=usage,
                timings=timings,
                metadata=request.metadata,
            )
        )


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


def _check_session_fields(request: Generate) -> None:
    if request.session_id is None:
        for name, given in (("drop_messages", request.drop_messages), ("history", request.history != "continue")):
            if given:
                raise BadRequest(f"{name} is for the messages of a session: send it with a session_id", field=name)
    elif request.drop_messages and request.history == "replace":
        raise BadRequest(
            "drop_messages does not go with history 'replace', which replaces all messages", field="drop_messages"
        )


def quantization(description: str) -> str | None:
    """The quantization in llama.cpp's description of a model, as file names have it: ``Q4_K_M``, ``F16``.

    ``None`` if the description names none.
    """
    found = re.search(r"\b((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4|NVFP4)(?: - (Small|Medium|Large)\b)?", description)
    if found is None:
        return None
    kind, size = found.groups()
    return f"{kind}_{size[0]}" if size else str(kind)


class Embedding(Answering):
    """A request to embed or to rank texts."""

    request: Embed | Rerank
    _pending: PendingEmbeddings | None = None

    @property
    def is_answered(self) -> bool:
        """See ``Answering``."""
        return self._pending is not None and self._pending.done.is_set()

    async def _serve(self) -> None:
        scheduler = self.service._scheduler
        check_pooling(self.request, scheduler.info)
        try:
            texts = await self.service._prompts.texts(
                self.request, scheduler.info.embedding_ctx, principal=self._principal.name
            )
        except trio.Cancelled:
            send_cancelled(self.request, self._sink, self._began)
            raise
        self._pending = pending = scheduler.embed(self.request, texts, self._sink, self._principal)
        try:
            await self._wait([pending.done], functools.partial(scheduler.cancel_embedding, pending))
        finally:
            log.info(
                "embedded" if isinstance(self.request, Embed) else "ranked",
                id=self.request.id,
                model=self.service.name,
                texts=pending.n_done,
                tokens=pending.n_tokens,
                total_ms=round(1e3 * (trio.current_time() - self._began), 1),
            )
