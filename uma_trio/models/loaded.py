"""From a configuration to a model that is ready to be served."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs
import structlog

from uma_trio.config import Config
from uma_trio.engine.calibrate import calibrate
from uma_trio.engine.layout import LayoutChoice
from uma_trio.engine.llama import LOAD_ERRORS, LlamaEngine, open_tokenizer
from uma_trio.engine.records import EngineError
from uma_trio.engine.thread import EngineThread
from uma_trio.engine.tokenizer import Tokenizer
from uma_trio.models import tuning_cache
from uma_trio.models.chat import BrokenTemplate, ChatTemplate
from uma_trio.models.control_tokens import ControlTokens
from uma_trio.models.gguf_check import GgufError, check_gguf
from uma_trio.models.prompt import PromptMaker
from uma_trio.models.tuning_cache import FileLayoutCache
from uma_trio.scheduling.cost import CostModel

log = structlog.get_logger("uma_trio.models")

EMBEDDED: Final = Path(__file__).parent / "embedded" / "embedded.gguf"
"""The demo and test model that comes with the package; see docs/EMBEDDED_MODEL.md."""


class ModelError(Exception):
    """The model cannot be loaded; says why and what to do."""


@attrs.frozen(eq=False)
class LoadedModel:
    """An engine with its tokenizer and its chat template."""

    engine: LlamaEngine
    prompts: PromptMaker
    cost: CostModel
    """What ticks cost here, measured while loading."""
    cost_name: str
    """Under which to keep what is learned later."""
    name: str
    """Says which model it is: what tokens mean."""
    state_name: str
    """Says that, and how the states of its sequences are laid out."""

    def token_to_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for."""
        return self.engine.tokenizer.token_to_bytes(token)


async def load_model(
    config: Config,
    thread: EngineThread,
    on_progress: Callable[[float], None] | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> LoadedModel | None:
    """Load what ``config.model`` names, once, in ``thread``.

    Args:
        on_progress: called in ``thread`` with the loaded share in [0, 1].
        go_on: asked in ``thread`` now and then; False gives loading up.

    Returns:
        The model, or ``None`` if loading was given up.

    Raises:
        ModelError: no such file, not a usable GGUF, not enough memory, or no libllama.
    """

    def progress(share: float) -> bool:
        if on_progress is not None:
            on_progress(share)
        return go_on()

    try:
        return await thread.run(lambda: _load(config, progress))
    except ModelError:
        if not go_on():
            return None
        raise


@contextlib.contextmanager
def vocabulary(path: Path, llama_dir: Path | None = None) -> Iterator[Tokenizer]:
    """The tokenizer of the GGUF at ``path``, without its weights.

    Raises:
        ModelError: as ``load_model``.
    """
    with _told(path):
        check_gguf(path, vocab_only=True)
        with open_tokenizer(path, llama_dir) as tokenizer:
            yield tokenizer


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Whatever goes wrong with the model at ``path`` in here is a ``ModelError`` that says what to do."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"there is no model at {path}") from None
    except (OSError, GgufError, EngineError, *LOAD_ERRORS) as error:
        said = str(error)
        where = "" if str(path) in said else f"{path}: "
        raise ModelError(f"cannot load {where}{said}") from error


def _load(config: Config, progress: Callable[[float], bool]) -> LoadedModel:
    path = config.model.model or EMBEDDED
    with _told(path):
        check_gguf(path)
        engine = LlamaEngine(path, config.model, progress, FileLayoutCache(path))
        _tell(engine.layout_choice)
        engine.measure_memory()
        name = tuning_cache.model_fingerprint(path, *engine.environment)
        cost = calibrate(engine, known=tuning_cache.load_costs(name))
    prompts = PromptMaker(engine.tokenizer, _chat_template(engine), config.limits)
    return LoadedModel(
        engine,
        prompts,
        cost,
        cost_name=name,
        name=tuning_cache.model_fingerprint(path),
        state_name=tuning_cache.model_fingerprint(path, *engine.state_layout),
    )


def _tell(choice: LayoutChoice) -> None:
    """Log how the KV cache is laid out, and what was measured."""
    measured = {each.layout.name: str(each) for each in choice.measured}
    more: dict[str, object] = {"measured": measured} if measured else {}
    if choice.why == "no time":
        more["hint"] = "uma-trio doctor takes the time to measure it, for the next start"
    log.info("layout of the KV cache", layout=choice.layout.name, why=choice.why, **more)


def _chat_template(engine: LlamaEngine) -> ChatTemplate | None:
    """The model's own template; a broken one costs the model its chats, and nothing else."""
    if engine.chat_template is None:
        return None
    tokenizer = engine.tokenizer
    try:
        controls = ControlTokens(tokenizer.control_tokens, tokenizer.user_defined_controls)
        return ChatTemplate(engine.chat_template, bos=tokenizer.bos, eos=tokenizer.eos, controls=controls)
    except (BrokenTemplate, ValueError) as error:
        log.warning("the model's chat template cannot be used; it serves plain prompts", reason=str(error))
        return None
