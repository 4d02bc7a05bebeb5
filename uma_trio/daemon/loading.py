"""Loads models for the registry: the engine, the storage and the runtime of controllers of each."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Final

import attrs
import structlog
import trio

from uma_trio.config import MB, Config, Model, ModelEntry, settings_of_model
from uma_trio.daemon.aici.link import RuntimeStart
from uma_trio.daemon.aici.supervisor import SupervisedRuntime
from uma_trio.daemon.engines.link import Launcher
from uma_trio.daemon.engines.loaded import LoadedModel, open_model
from uma_trio.daemon.kv_events.publisher import KvEventPublisher
from uma_trio.daemon.perf_log import PerfLog, perf_log
from uma_trio.daemon.registry import ModelSpec, Needs
from uma_trio.daemon.registry.outline import ModelOutline, read_outline
from uma_trio.daemon.service import ModelService
from uma_trio.daemon.storage import open_storage, storage_name
from uma_trio.engine_link.defaults import FLOOR_TOKENS
from uma_trio.files import state_folder
from uma_trio.hub.environment import ModelLocations
from uma_trio.hub.errors import AliasFileError, HubError
from uma_trio.hub.locate import LocatedModel, find_installed, installed_models
from uma_trio.hub.variants import quantization_of
from uma_trio.models.packaged import model_path
from uma_trio.models.purpose import Purpose
from uma_trio.processes.energy import meter_of_this_machine
from uma_trio.processes.machine import default_threads, machine_memory_bytes
from uma_trio.protocol.answers import Capability, ModelDescription, bare_name

log = structlog.get_logger("uma_trio.daemon")

ON_DEMAND_IDLE_S: Final = 300.0
"""When a model that was loaded on demand is unloaded, without ``idle_unload_s``."""
BUDGET_SHARE: Final = 0.8
"""Share of the machine's memory, or of the GPU's, for all models together."""
LISTED_S: Final = 5.0
"""How long a list of the installed models counts as current."""


def specs_of(config: Config) -> list[ModelSpec]:
    """The models that the settings name, the default one first.

    Args:
        config: with paths in place of names; see ``cli.model_option.located``.
    """
    if not config.models:
        return [attrs.evolve(_spec(config, config.model.alias), at_start=config.loading.load == "start")]
    specs: list[ModelSpec] = []
    for number, entry in enumerate(config.models):
        settings = settings_of_model(config, entry)
        spec = attrs.evolve(
            _spec(settings, entry.name),
            aliases=entry.alias,
            pinned=entry.model_class == "pinned",
            at_start=_loads_at_start(config, number, entry),
        )
        if any(_is_same(other, spec) for other in specs):
            spec = attrs.evolve(spec, storage=hashlib.sha256(spec.name.encode()).hexdigest()[:8])
        specs.append(spec)
    return specs


def _loads_at_start(config: Config, number: int, entry: ModelEntry) -> bool:
    """Whether the daemon loads a model of the list before it serves.  The default one is, whatever its entry says."""
    is_wanted = config.loading.load == "start" and (entry.load == "start" or number == 0)
    return is_wanted or entry.model_class == "pinned"


def _spec(config: Config, name: str | None) -> ModelSpec:
    path = model_path(config.model.model)
    return ModelSpec(
        name=bare_name(name or path.name),
        config=attrs.evolve(config, models=()),
        idle_unload_s=config.loading.idle_unload_s or 0.0,
    )


def _is_same(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether two models have the same content, so that the names of their storage must differ."""
    try:
        return storage_name(one.config) == storage_name(other.config)
    except OSError:
        return False


class LoadedService:
    """A model that serves; see ``registry.OpenModel``.

    Args:
        stack: closes what ``open_storage`` opens.
        perf: where the perf log is, if it is to have the model's records.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: LoadedModel,
        service: ModelService,
        stack: contextlib.ExitStack,
        perf: CurrentPerfLog | None,
    ) -> None:
        self.service = service
        self.storage_name = model.name if spec.storage is None else f"{model.name}-{spec.storage}"
        info = model.info
        self.memory_bytes = round(info.size_bytes + info.n_ctx * info.kv_bytes_per_token)
        self._config = spec.config
        self._model = model
        self._stack = stack
        self._perf = perf

    async def open_storage(self) -> None:
        """See ``registry.OpenModel``."""
        context = open_storage(self._config, self._model, self.storage_name)
        storage = await trio.to_thread.run_sync(context.__enter__)
        self._stack.push(context.__exit__)
        if self._perf is not None:
            perf = self._perf.file = self._stack.enter_context(
                perf_log(self._config, self._model.info, self._model.identity)
            )
            if perf is not None:
                self._stack.enter_context(self.service.recording(perf))
        await self.service.open_storage(storage.journal, storage.files, storage.states, storage.pictures)


@attrs.define
class CurrentPerfLog:
    """The perf log, which has the records of the default model."""

    file: PerfLog | None = None

    @property
    def dropped(self) -> int | None:
        """Records that were not written; ``None`` without a log."""
        return None if self.file is None else self.file.dropped


class Opener:
    """Loads models with a launcher of engines.

    Args:
        config: of the daemon.
        launcher: starts engines; what it needs outlives all models.
        default: name of the default model.
        locations: where models of this machine are; ``None``: only the configured ones are known.
        kv_events: publishes what the KV cache of the default model holds.
    """

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        default: str,
        locations: ModelLocations | None = None,
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._default = default
        self._locations = locations
        self._kv_events = kv_events
        self._finding = trio.CapacityLimiter(1)
        """Requests for unknown models wait for each other, and take no more than one thread."""
        self.on_demand = config.loading.on_demand
        self.perf = CurrentPerfLog()
        self.budget_bytes = config.loading.models_memory_mb * MB
        self.budget_is_set = config.loading.models_memory_mb > 0
        self.n_threads = default_threads()
        self._listed: tuple[float, list[ModelSpec]] = (float("-inf"), [])

    @contextlib.asynccontextmanager
    async def open(
        self,
        spec: ModelSpec,
        room_bytes: int,
        on_progress: Callable[[float], None],
        should_continue: Callable[[], bool],
    ) -> AsyncIterator[LoadedService | None]:
        """See ``registry.ModelOpener``."""
        settings = spec.config.model
        if room_bytes:
            settings = with_less_context(settings, room_bytes - (await self._outline(spec)).summary.size_bytes)
        config = attrs.evolve(spec.config, model=settings)
        async with open_model(config, self._launcher, on_progress, should_continue) as model:
            if model is None:
                yield None
                return
            self._set_budget(model)
            runtime = make_runtime(spec.config, model)
            with contextlib.ExitStack() as stack:
                limit = spec.config.scheduling.power_limit
                meter = meter_of_this_machine()
                if meter is None and limit is not None and not limit.rstrip().endswith("%"):
                    log.warning("the power limit has no effect: nothing counts energy", power_limit=limit)
                service = ModelService(spec.config, model, runtime=runtime, meter=meter)
                if self._kv_events is not None and spec.name == self._default:
                    following = self._kv_events.following(service.scheduler.cache)
                    service.scheduler.on_step = stack.enter_context(following)
                async with trio.open_nursery() as nursery:
                    if runtime is not None:
                        nursery.start_soon(runtime.run)
                    for fact, fields in service.describe().items():
                        log.info(fact, **fields)
                    perf = self.perf if spec.name == self._default else None
                    try:
                        yield LoadedService(spec, model, service, stack, perf)
                    finally:
                        service.keep_learned_costs()
                    nursery.cancel_scope.cancel()

    def _set_budget(self, model: LoadedModel) -> None:
        """The first model says on which device there must be room."""
        if self.budget_bytes:
            return
        devices = model.devices
        gpus = [
            device.memory_total for device in devices.found if device.is_gpu and device.name in (devices.used or ())
        ]
        total = sum(gpus) if gpus and devices.layers_on_gpu else machine_memory_bytes()
        self.budget_bytes = round(BUDGET_SHARE * total)

    async def needs(self, spec: ModelSpec) -> Needs:
        """See ``registry.ModelOpener``."""
        outline, settings = await self._outline(spec), spec.config.model
        whole = outline.memory_bytes(settings)
        if settings.ctx:
            return Needs(whole=whole, least=whole)
        least = attrs.evolve(settings, ctx=settings.parallel * min(FLOOR_TOKENS, outline.context(settings)))
        return Needs(whole=whole, least=outline.memory_bytes(least))

    async def describe(self, spec: ModelSpec) -> ModelDescription:
        """See ``registry.ModelOpener``."""
        outline, settings = await self._outline(spec), spec.config.model
        summary = outline.summary
        parallel = settings.parallel if summary.purpose == "generate" else 1
        capabilities: dict[Purpose, list[Capability]] = {
            "generate": ["completion", "chat", "tools"] if summary.has_template else ["completion"],
            "embed": ["embedding"],
            "rank": ["rerank"],
        }
        return ModelDescription(
            name=spec.name,
            description=summary.architecture,
            architecture=summary.architecture,
            quantization=quantization_of(str(model_path(settings.model))) or None,
            size_bytes=summary.size_bytes,
            n_parameters=summary.n_parameters,
            context=outline.context(settings) * parallel,
            context_per_request=outline.context(settings),
            parallel=parallel,
            capabilities=capabilities[summary.purpose],
            embedding_length=0 if summary.sizes is None else summary.sizes.n_embd,
            created_at=outline.written_at,
            state="unloaded",
        )

    async def _outline(self, spec: ModelSpec) -> ModelOutline:
        return await trio.to_thread.run_sync(read_outline, model_path(spec.config.model.model))

    async def find(self, name: str) -> ModelSpec | None:
        """See ``registry.ModelOpener``."""
        if self._locations is None:
            return None
        try:
            model = await trio.to_thread.run_sync(find_installed, name, self._locations, limiter=self._finding)
        except AliasFileError as error:
            log.warning("no model can be looked up by name", reason=error.reason, fix=error.remedy)
            return None
        except (HubError, OSError):
            return None
        return self._on_demand(model.name, str(model.path))

    async def installed(self) -> list[ModelSpec]:
        """See ``registry.ModelOpener``."""
        if self._locations is None or self.on_demand is False:
            return []
        at, listed = self._listed
        if trio.current_time() - at > LISTED_S:
            models = await trio.to_thread.run_sync(_served_models, self._locations)
            listed = [self._on_demand(model.name, str(model.path)) for model in models]
            self._listed = trio.current_time(), listed
        return listed

    def _on_demand(self, name: str, path: str) -> ModelSpec:
        settings = attrs.evolve(self._config.model, model=path, alias=name, draft_model=None, mmproj=None, adapters=())
        idle_s = self._config.loading.idle_unload_s
        return ModelSpec(
            name=name,
            config=attrs.evolve(self._config, model=settings, models=()),
            at_start=False,
            idle_unload_s=ON_DEMAND_IDLE_S if idle_s is None else idle_s,
            is_configured=False,
        )


def _served_models(locations: ModelLocations) -> list[LocatedModel]:
    """The models of this machine that can be served: no adapters, no damaged files.  Blocks."""
    return [model for model in installed_models(locations) if read_outline(model.path).summary.size_bytes]


def with_less_context(settings: Model, kv_bytes: int) -> Model:
    """The settings with which the KV cache takes ``kv_bytes`` at most."""
    limit_mb = max(1, kv_bytes // MB)
    return attrs.evolve(settings, kv_mem_limit_mb=min(limit_mb, settings.kv_mem_limit_mb or limit_mb))


def make_runtime(config: Config, model: LoadedModel) -> SupervisedRuntime | None:
    """Return the runtime of a model's controllers, as configured; ``None`` if there are to be none."""
    info = model.info
    if config.aici.enabled == "disabled" or info.purpose != "generate":
        return None
    start = RuntimeStart(
        config.aici,
        model_path(config.model.model),
        folder=state_folder(config.sessions.state_dir) / "aici",
        n_vocab=info.n_vocab,
        n_rows=info.n_seq_max,
        max_controller_bytes=config.limits.max_controller_bytes,
        expire_s=round(config.limits.request_timeout_s) + 1,
        llama_dir=config.model.llama_dir,
    )
    return SupervisedRuntime(start, max_tokens=info.n_ctx)
