"""From a configuration to a model that is ready to be served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from uma_trio.config import Config
from uma_trio.engine.llama import LOAD_ERRORS, LlamaEngine
from uma_trio.engine.thread import EngineThread
from uma_trio.models.chat import ChatTemplate
from uma_trio.models.gguf_check import GgufError, check_gguf
from uma_trio.models.prompt import PromptMaker

EMBEDDED: Final = Path(__file__).parent / "embedded" / "embedded.gguf"
"""The demo and test model that comes with the package; see docs/EMBEDDED_MODEL.md."""


class ModelError(Exception):
    """The model cannot be loaded; says why and what to do."""


@attrs.frozen(eq=False)
class LoadedModel:
    """An engine with its tokenizer and its chat template."""

    engine: LlamaEngine
    prompts: PromptMaker

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` stands for."""
        return self.engine.tokenizer.piece(token)


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


def _load(config: Config, progress: Callable[[float], bool]) -> LoadedModel:
    path = config.model.model or EMBEDDED
    try:
        check_gguf(path)
        engine = LlamaEngine(path, config.model, progress)
    except FileNotFoundError:
        raise ModelError(f"there is no model at {path}") from None
    except (OSError, GgufError, *LOAD_ERRORS) as error:
        raise ModelError(f"cannot load {path}: {error}") from error
    tokenizer = engine.tokenizer
    chat = engine.chat_template and ChatTemplate(engine.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
    return LoadedModel(engine, PromptMaker(tokenizer, chat or None, config.limits))
