"""What a door sees of one model: its scheduler, its sessions and its prompts, and what takes several of them.

``uma_trio.daemon.registry`` has the services by the names of their models, and ``uma_trio.daemon.requests`` what a
service does for one request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import attrs
import trio

from uma_trio.aici_link.messages import Auth
from uma_trio.config import MB, Config, Sampling
from uma_trio.daemon.aici import library
from uma_trio.daemon.aici.exchange import ControllerRuntime
from uma_trio.daemon.engines.loaded import LoadedModel
from uma_trio.daemon.engines.saved_costs import save_costs
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.prompts.fair_limiter import FairLimiter
from uma_trio.daemon.prompts.prompt import PromptMaker
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.offload import InThread, StateFiles
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.serving.steering import Steering
from uma_trio.daemon.sessions import Sessions
from uma_trio.daemon.store.journal import Journal
from uma_trio.daemon.store.picture_folder import PictureFolder
from uma_trio.errors import BadRequest, ControllerUnavailable
from uma_trio.grammar.calls import AnswerShape
from uma_trio.grammar.compiler import Grammar
from uma_trio.models.purpose import IN_WORDS
from uma_trio.models.sampling_defaults import sampling_defaults
from uma_trio.principal import Principal
from uma_trio.processes.energy import EnergyMeter
from uma_trio.protocol.answers import (
    AdapterDescription,
    Capability,
    HealthCheck,
    ModelDescription,
    Steered,
    bare_name,
)
from uma_trio.protocol.controllers import Controllers, ControllersQuery
from uma_trio.protocol.queries import SteerQuery, request_ids
from uma_trio.protocol.requests import AdapterChoice, Constraint, Generate, PoolingRequest
from uma_trio.telemetry.perf_records import PerfSink

AnyRequest = TypeVar("AnyRequest", bound=Generate | PoolingRequest)


class ModelService:
    """Serves one model.

    Args:
        in_thread: runs a blocking call.
        runtime: of controllers; ``None``: requests cannot have one.
        meter: counts energy; ``None``: nothing does.
    """

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        *,
        in_thread: InThread = trio.to_thread.run_sync,
        runtime: ControllerRuntime | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:
        self.name = model.info.served_name
        self._model = model
        self._sampling = sampling_defaults(config.sampling, model.recommended_sampling)
        values: dict[str, Any] = {name: default.value for name, default in self._sampling.items()}
        seed = config.sampling.seed
        self._defaults = {**values, **({} if seed is None else {"seed": seed})}
        config = attrs.evolve(config, sampling=Sampling(**self._defaults))
        self.limits = config.limits
        self.prompts: PromptMaker = model.prompts
        self.runtime: ControllerRuntime | None = runtime
        """Runs controllers; ``None``: this daemon runs none."""
        self.scheduler = Scheduler(
            model.engine,
            model.token_to_bytes,
            config,
            model.cost,
            in_thread,
            runtime,
            spell_each=model.prompts.tokenizer.tokens_to_bytes,
            meter=meter,
        )
        self.sessions = Sessions(config, self.scheduler, model.prompts, content=self.content, in_thread=in_thread)
        self._in_thread = in_thread
        self._checking = FairLimiter(1)
        """One constraint is checked at a time: hostile ones wait for each other, take no more than one thread, and principals
        take turns."""
        self.is_draining = False

    @property
    def content(self) -> str:
        """Names what the model is, whatever it is called: another one cannot go on with its answers."""
        info = self._model.info
        return f"{info.description}, {info.n_params} parameters, {info.size_bytes} bytes, {info.n_vocab} tokens"

    # -- requests -------------------------------------------------------------------------------

    def with_named_adapter(self, request: AnyRequest) -> AnyRequest:
        """``request`` with the adapter that its ``model`` names, if that is ``MODEL:ADAPTER``."""
        model = request.model or self.name
        adapter = model.rpartition(":")[2]
        known = [known_adapter.name for known_adapter in self._model.info.adapters]
        if bare_name(model) == self.name or adapter not in known:
            return request
        return attrs.evolve(request, adapters=[*request.adapters, AdapterChoice(name=adapter)])

    async def compile(self, shape: Constraint | AnswerShape, principal: Principal) -> Grammar:
        """The grammar of what an answer must look like.

        Raises:
            UmaError: it cannot be compiled.
        """
        grammars = self._model.grammars
        grammar: Grammar | None = await self._in_thread(grammars.find, shape)
        if grammar is None:
            async with self._checking.of(principal.name):
                grammar = await self._in_thread(grammars.compile, shape)
        return grammar

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
        return await library.answer(self.runtime, query, wasm, Auth(principal.name, is_admin))

    def answers_of(self, request_id: str, principal: str) -> list[Answer]:
        """The unfinished answers of a request of ``principal``, by its id or theirs, with or without a connection."""
        ids = request_ids(request_id)
        return [
            answer
            for answer in self.scheduler.answers()
            if answer.request.id in ids and answer.principal.name == principal
        ]

    async def steer(self, answer: Answer, query: SteerQuery) -> Steered:
        """Change a running answer; returns what was changed when that is done, mostly within two ticks.

        A change of a detached answer survives the daemon when this returns.

        Raises:
            AnswerNotFound: it has ended before.
            BadRequest: it cannot be changed so.
        """
        limit = None
        if query.end_reasoning or query.message is not None:
            limit = self.prompts.reasoning_end(answer.prompt, answer.request)
            if limit is None and query.end_reasoning:
                raise BadRequest(
                    "there is no reasoning to end: the model marks none, or a constraint allows none",
                    field="end_reasoning",
                )
        tokens, opens_reasoning = [] if query.text is None else self.prompts.appended(query.text), False
        if query.message is not None:
            tokens, opens_reasoning = await self.prompts.message(
                query.message, answer.request, principal=answer.principal.name
            )
        steering = Steering(query=query, tokens=tokens, opens_reasoning=opens_reasoning, reasoning_limit=limit)
        self.scheduler.steer(answer, steering)
        steered = await steering.wait()
        if answer.record is not None and steering.change is not None:
            await answer.record.kept(steering.change)
        return steered

    def description(self) -> ModelDescription:
        """What a client may want to know of the model."""
        info, model = self._model.info, self._model
        has_chat = self.prompts.chat is not None
        capabilities: dict[Capability, bool] = {
            "completion": info.purpose == "generate",
            "chat": has_chat,
            "tools": has_chat,
            "reasoning": self.prompts.reasoning is not None,
            "infill": self.prompts.infill is not None,
            "vision": self.prompts.pictures.sees,
            "audio": self.prompts.pictures.hears,
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
                AdapterDescription(
                    name=adapter.name, scale=adapter.scale, rank=adapter.rank, size_bytes=adapter.size_bytes
                )
                for adapter in info.adapters
            ],
            sampling=self._defaults,
            eog_tokens=[*info.eog_ids],
            created_at=model.written_at,
        )

    # -- for the server -------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.scheduler.run)
            nursery.start_soon(self.sessions.sweep_forever)
            nursery.start_soon(self.prompts.pictures.run)
            task_status.started()

    async def open_storage(
        self,
        journal: Journal | None,
        files: StateFiles | None = None,
        states: Iterable[SavedState] = (),
        pictures: PictureFolder | None = None,
    ) -> None:
        """Make sessions durable, and load those of earlier runs.  ``run`` must be running.

        Args:
            journal: ``None``: sessions end with the daemon.
            files: where KV states go; ``None``: nowhere.
            states: those that are there.
            pictures: where encoded pictures go; ``None``: nowhere.
        """
        if pictures is not None:
            self.prompts.pictures.open(pictures)
        if files is not None:
            self.scheduler.offloader.open(files, states)
        if journal is not None:
            await self.sessions.open(journal)

    def drain(self) -> None:
        """Accept no more requests; those that were accepted go on."""
        self.is_draining = True
        self.scheduler.close()

    async def save_everything(self) -> None:
        """Bring sessions and their KV states to disk.  ``run`` must be running."""
        await self.sessions.repair()
        await self.scheduler.offloader.save_everything()

    @property
    def n_threads(self) -> int:
        """Compute threads that the model has where no other model computes."""
        return self._model.info.n_threads

    def keep_learned_costs(self) -> None:
        """Keep what was learned of the engine's speed for the next start.  Blocks briefly."""
        self.scheduler.set_threads(self.n_threads)
        save_costs(self._model.cost_name, self.scheduler.timings.cost)

    def stop(self) -> None:
        """End all requests and the engine at once."""
        self.is_draining = True
        self.scheduler.stop()

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; ``None`` if it runs in a thread."""
        return self._model.engine.link.pid

    def describe(self) -> dict[str, dict[str, Any]]:
        """What does not change while the model is loaded: facts by name, each with its fields."""
        info, fit, devices = self._model.info, self._model.fit, self._model.devices
        adapters = ", ".join(
            [f"{adapter.name} (rank {adapter.rank}, scale {adapter.scale:g})" for adapter in info.adapters]
        )
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
                name: f"{default.value:g} ({default.source})"
                for name, default in self._sampling.items()
                if default.source != "built in" or name == "temperature"
            },
        }

    def health(self) -> list[HealthCheck]:
        """Whether the model can serve another request now.  Never waits for a step."""
        loaded = HealthCheck(name="model", ok=True, reason="loaded")
        return [attrs.evolve(check, model=self.name) for check in (loaded, *self.scheduler.health())]

    @contextlib.contextmanager
    def recording(self, sink: PerfSink) -> Iterator[None]:
        """Pass a record of each tick and of each request that ends on to ``sink``."""
        sinks = self.scheduler.sinks
        sinks.append(sink)
        try:
            yield
        finally:
            sinks.remove(sink)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics.  Never waits for a step."""
        pictures = self.prompts.pictures.snapshot()
        return {
            **self.scheduler.snapshot(),
            "sessions": self.sessions.snapshot(),
            "constraints": self._model.grammars.snapshot(),
            "devices": {memory.device: memory.snapshot() for memory in self._model.devices.memory},
            **({"pictures": pictures} if pictures else {}),
        }


def quantization(description: str) -> str | None:
    """The quantization in llama.cpp's description of a model, as file names have it: ``Q4_K_M``, ``F16``.

    ``None`` if the description names none.
    """
    match = re.search(r"\b((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4|NVFP4)(?: - (Small|Medium|Large)\b)?", description)
    if match is None:
        return None
    kind, size = match.groups()
    return f"{kind}_{size[0]}" if size else str(kind)
