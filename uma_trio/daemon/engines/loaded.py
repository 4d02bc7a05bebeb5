"""From a configuration to a running engine, with what the daemon needs of its model."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

import attrs
import msgspec
import structlog
import trio

from uma_trio.config import Config, Limits, Model
from uma_trio.config.lists import NO_DEVICES
from uma_trio.daemon.engines.adapter_check import check_adapters
from uma_trio.daemon.engines.calibrate import calibrate
from uma_trio.daemon.engines.link import EngineLink, Launcher
from uma_trio.daemon.engines.saved_costs import load_costs, save_costs
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.engines.warm_up import warm_up
from uma_trio.daemon.policy.cost import CostModel
from uma_trio.daemon.prompts.chosen_template import choose_template
from uma_trio.daemon.prompts.context import explain_context, is_short, more_context
from uma_trio.daemon.prompts.open_prompts import open_prompts
from uma_trio.daemon.prompts.pictures import NoPictures, Pictures, open_pictures
from uma_trio.daemon.prompts.prompt import PromptMaker
from uma_trio.encoder.encoder import Projector
from uma_trio.engine_link.defaults import SHARES
from uma_trio.engine_link.devices import Devices, size
from uma_trio.engine_link.load_errors import explained
from uma_trio.engine_link.messages import FitReport, LayoutReport, LoadError, ModelInfo, Ready, Start
from uma_trio.grammar.checker import SandboxedChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.grammar.vocabulary import Vocabulary
from uma_trio.hub.caches import ollama_projectors
from uma_trio.models.fingerprint import model_fingerprint
from uma_trio.models.gguf_check import GgufError, GgufSummary, check_gguf
from uma_trio.models.packaged import model_path, starts_with_first_picture
from uma_trio.models.projector import check_projector, encoding_bytes, find_projector
from uma_trio.models.purpose import IN_WORDS
from uma_trio.models.sampling_defaults import recommended
from uma_trio.processes.machine import machine_memory_bytes
from uma_trio.processes.sandbox import CannotStart, Ended
from uma_trio.tokenizer.tokenizer import open_vocabulary

log = structlog.get_logger("uma_trio.models")

LOADED_SHARE: Final = 0.8
"""The part of a start's progress that loading the file is."""

NO_PROJECTOR: Final = "off"
"""Setting of a model that is not to see pictures."""
NOTHING_TO_SEE_WITH: Final = (
    "it has no projector. Put its mmproj file, mmproj-NAME.gguf, next to the model's file, or start uma-trio serve with "
    "--mmproj FILE"
)


@attrs.frozen(eq=False)
class LoadedModel:
    """An engine that runs, and what the daemon needs of the model besides.

    The tokenizer is that of a vocabulary-only model in this process; the weights are in the engine.
    """

    engine: SupervisedEngine
    prompts: PromptMaker
    grammars: GrammarCompiler
    cost: CostModel
    """What steps cost here, measured while loading."""
    cost_name: str
    """Under which to keep what is learned later."""
    name: str
    """Fingerprint of the model: what tokens mean."""
    state_name: str
    """Fingerprint of the model and of how the states of its sequences are laid out."""
    chat_template: str | None = None
    """Where the chat template comes from, for people; ``None`` if there is none."""
    template_source: str | None = None
    """The chat template itself."""
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    """Metadata of the model file, without arrays."""
    written_at: float = 0.0
    """When the model file was last written, in seconds since 1970."""
    recommended_sampling: Mapping[str, float] = attrs.field(factory=dict)
    """Sampling parameters that the model file recommends, by name."""

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def devices(self) -> Devices:
        return self.engine.link.ready.devices

    @property
    def fit(self) -> FitReport | None:
        """How the model was fitted to the memory; ``None`` if that is off."""
        return self.engine.link.ready.fit

    @property
    def identity(self) -> dict[str, str]:
        """What decides the tokens of all answers, by name: other values may give other texts."""
        template = (self.template_source or "").encode()
        environment = self.engine.link.ready.environment
        return {"model": self.name, "template": hashlib.sha256(template).hexdigest()[:32], "environment": environment}

    def token_to_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for."""
        return self.prompts.tokenizer.token_to_bytes(token)


@contextlib.asynccontextmanager
async def open_model(
    config: Config,
    launcher: Launcher,
    on_progress: Callable[[float], None] | None = None,
    should_continue: Callable[[], bool] = lambda: True,
) -> AsyncIterator[LoadedModel | None]:
    """Load what ``config.model`` names; at the end of the context its engine ends.

    Args:
        launcher: starts the engine.
        on_progress: called with the share that is done, in [0, 1].
        should_continue: asked now and then; False gives loading up, and the context gets ``None``.

    Raises:
        ModelError: no such file, not a usable GGUF, not enough memory, no libllama, or a broken ``chat_template``.
    """
    path = model_path(config.model.model)
    given = None
    if config.model.chat_template is not None:
        given = await trio.to_thread.run_sync(choose_template, config.model.chat_template)
    start = await _checked(config, path)
    with explained(path):
        loading, warming = _parts(on_progress or (lambda share: None))
        link = await _load(launcher, start, loading, should_continue, config.engine.hang_timeout_s)
    if link is None:
        yield None
        return
    engine = SupervisedEngine(launcher, start, link, config.engine)
    with contextlib.ExitStack() as stack:
        try:
            _log_loaded(start, link.ready, config.limits)
            with explained(path):
                # the engine has loaded this vocabulary before, so it does not end this process
                vocabulary = await trio.to_thread.run_sync(
                    stack.enter_context, open_vocabulary(path, config.model.llama_dir)
                )
                if start.purpose == "generate" and not await warm_up(link, warming, should_continue):
                    yield None
                    return
                warming(1.0)
                cost_name, cost = await _costs(link, start)
            # in threads: they start processes, and other models may be serving
            with explained(start.projector or path):
                pictures = await trio.to_thread.run_sync(_open_pictures, start, link.ready, stack)
            opening = open_prompts(config, engine.info, vocabulary, given, pictures)
            prompts, template = await trio.to_thread.run_sync(stack.enter_context, opening)

            def grammar_vocabulary() -> Vocabulary:
                return vocabulary.tokenizer.grammar_vocabulary(engine.info.eog_ids)

            checker = SandboxedChecker(grammar_vocabulary)
            stack.callback(checker.close)
            yield LoadedModel(
                engine,
                prompts,
                GrammarCompiler(grammar_vocabulary, checker),
                cost,
                cost_name=cost_name,
                name=model_fingerprint(path),
                state_name=model_fingerprint(path, link.ready.state_format),
                chat_template=None if template is None else template.origin,
                template_source=None if template is None else template.text,
                metadata=vocabulary.metadata,
                written_at=path.stat().st_mtime,
                recommended_sampling=_recommended_sampling(vocabulary.metadata),
            )
        finally:
            await engine.link.aclose()


async def _checked(config: Config, path: Path) -> Start:
    """Check the files of the model, of its draft model and of its adapters; returns what the engine is to load.

    Raises:
        ModelError: one of them cannot be used.
    """
    with explained(path):
        summary = await trio.to_thread.run_sync(check_gguf, path)
    draft_sizes = None
    if config.model.draft_model is not None:
        draft = Path(config.model.draft_model)
        with explained(draft):
            of_draft = await trio.to_thread.run_sync(check_gguf, draft)
            _check_draft(path, summary, draft, of_draft)
            draft_sizes = of_draft.sizes
    projector = await trio.to_thread.run_sync(_find_projector, config.model, path, summary)
    return Start(
        path,
        config.model,
        sizes=summary.sizes,
        draft_sizes=draft_sizes,
        min_batch=config.min_batch,
        adapters=await trio.to_thread.run_sync(check_adapters, config.model.adapters, path),
        purpose=summary.purpose,
        target_itl_ms=config.scheduling.target_itl_ms,
        projector=projector,
        library_log_level=logging.getLogger("llama_abi").getEffectiveLevel(),
    )


def _parts(on_progress: Callable[[float], None]) -> tuple[Callable[[float], None], Callable[[float], None]]:
    """The progress of loading the file and of what follows, as parts of the whole."""
    return (
        lambda share: on_progress(LOADED_SHARE * share),
        lambda share: on_progress(LOADED_SHARE + (1 - LOADED_SHARE) * share),
    )


def _find_projector(settings: Model, path: Path, summary: GgufSummary) -> Path | None:
    """The projector that the settings name, or that is next to the model; ``None`` without a projector.  Blocks.

    Raises:
        ModelError: the projector of the settings does not fit this model.
    """
    if settings.mmproj == NO_PROJECTOR or summary.purpose != "generate":
        return None
    if settings.mmproj is None:
        projector = find_projector(path, ollama_projectors(path))
    else:
        projector = Path(settings.mmproj).expanduser()
    if projector is not None:
        with explained(projector):
            check_projector(projector, path)
    return projector


def _open_pictures(start: Start, ready: Ready, stack: contextlib.ExitStack) -> Pictures | NoPictures:
    """What encodes the model's pictures, until ``stack`` ends.  Blocks while a process starts.

    Only libmtmd knows whether it can use a projector, so the process says it, before the model claims to see.

    Raises:
        GgufError: the projector of the settings cannot be used.
    """
    settings, path = start.settings, start.projector
    if path is None:
        return NoPictures(f"it is served with mmproj {NO_PROJECTOR}" if settings.mmproj else NOTHING_TO_SEE_WITH)
    projector = Projector(
        path,
        start.path,
        use_gpu=settings.mmproj_offload and bool(ready.devices.layers_on_gpu),
        n_threads=ready.info.n_threads,
        niceness=settings.mmproj_niceness,
        max_tokens=ready.info.max_request_tokens,
        llama_dir=settings.llama_dir,
    )
    waits = starts_with_first_picture(path) or (ready.fit is not None and ready.fit.encoder_waits)
    try:
        if waits and not projector.use_gpu:
            _check_ever_fits(path)
        opening = open_pictures(projector, ready.info.n_ubatch, waits=waits)
        pictures = stack.enter_context(opening)
    except (CannotStart, Ended) as error:
        if settings.mmproj is not None:
            raise GgufError(f"the projector {path} cannot be used: {error}", "leave out mmproj") from None
        log.warning("the model cannot see pictures", projector=str(path), reason=str(error))
        return NoPictures(str(error))
    log.info("the model sees pictures", projector=str(path), encoder="starts with the first one" if waits else None)
    return pictures


def _check_ever_fits(projector: Path) -> None:
    """
    Raises:
        CannotStart: encoding takes more memory than the machine has.
    """
    needed, total = encoding_bytes(projector), machine_memory_bytes()
    if needed > total:
        raise CannotStart(f"encoding takes {size(needed)}, and this machine has {size(total)} of memory")


async def _costs(link: EngineLink, start: Start) -> tuple[str, CostModel]:
    """What steps cost here, and the name under which that is kept.  A model that embeds or ranks has no ticks to measure."""
    name = model_fingerprint(start.path, link.ready.environment)
    known = load_costs(name)
    if start.purpose != "generate":
        return name, known or CostModel()
    cost = await calibrate(link, known=known, may_have_stairs=bool(link.ready.devices.layers_on_gpu))
    save_costs(name, cost)  # for the next start, also if this process is killed
    return name, cost


def _check_draft(path: Path, summary: GgufSummary, draft: Path, of_draft: GgufSummary) -> None:
    """
    Raises:
        GgufError: one of the two does not generate text.
    """
    for file, part in ((path, summary), (draft, of_draft)):
        if part.purpose != "generate":
            raise GgufError(
                f"{file} {IN_WORDS[part.purpose]}, and a draft model is for models that generate text",
                "leave out draft_model, or name models that generate text",
            )


async def _load(
    launcher: Launcher,
    start: Start,
    on_progress: Callable[[float], None],
    should_continue: Callable[[], bool],
    hang_timeout_s: float,
) -> EngineLink | None:
    """An engine that has loaded the model; ``None`` if loading was given up.

    If memory is short although the model was fitted, tries again with less.

    Raises:
        LoadError: the model cannot be loaded.
    """
    for attempt in range(len(SHARES)):
        link = launcher.launch(start.settings.alias or start.path.name)
        try:
            return link if await link.load(start, on_progress, should_continue, hang_timeout_s) else None
        except LoadError as error:
            if start.settings.fit == "off" or not error.is_about_memory or attempt + 1 == len(SHARES):
                raise
            share = SHARES[attempt + 1]
            log.warning("there was not enough memory; trying with less", reason=str(error), share_of_free=share)
            start = msgspec.structs.replace(start, attempt=attempt + 1)
            if "mmap" in str(error):  # then reading the file takes less address space than mapping it
                start = msgspec.structs.replace(start, settings=attrs.evolve(start.settings, mmap=False))
    raise AssertionError("unreachable")


def _log_loaded(start: Start, ready: Ready, limits: Limits) -> None:
    warn_without_gpu(start.settings, ready.devices)
    if start.purpose == "generate":
        _log_layout(ready.layout)
        _log_context(ready.info, limits)


def warn_without_gpu(settings: Model, devices: Devices) -> None:
    """Log how to use a GPU that stays unused, unless the settings want none."""
    wants_none = NO_DEVICES in settings.devices or settings.gpu_layers == 0
    if devices.fix is not None and not wants_none:
        log.warning("the model runs without a GPU", device=str(devices), fix=devices.fix)


def _log_context(info: ModelInfo, limits: Limits) -> None:
    """Log how to get more context; nothing where the model allows no more."""
    if more := more_context(info):
        level = logging.WARNING if is_short(info, limits) else logging.INFO
        log.log(level, "context", context=explain_context(info), hint=f"{more} gives a request more")


def _log_layout(layout: LayoutReport) -> None:
    hint = None
    if layout.reason == "no time":
        hint = "uma-trio doctor takes the time to measure it, for the next start"
    elif layout.reason == "measured" and not layout.is_saved:
        hint = "this cannot be saved, so the next start measures again; uma-trio doctor says why"
    for name, ticks in layout.measured.items():
        log.info("measured a layout of the KV cache", layout=name, ticks=ticks)
    log.info("layout of the KV cache", layout=layout.name, why=layout.reason, rule=layout.rule or None, hint=hint)


def _recommended_sampling(metadata: Mapping[str, str]) -> dict[str, float]:
    parameters, problems = recommended(metadata.get)
    for problem in problems:
        log.warning("ignored a sampling parameter of the model file", reason=problem)
    return parameters
