"""What a model's file says, without loading it: for lists of models, and to see whether there is room for one."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import attrs

from uma_trio.config import Model
from uma_trio.engine_link.defaults import DEFAULT_WINDOW, with_defaults
from uma_trio.models.gguf_check import check_gguf
from uma_trio.models.gguf_header import GgufError, read_header
from uma_trio.models.purpose import Purpose
from uma_trio.models.sizes import ModelSizes


@attrs.frozen(kw_only=True)
class ModelOutline:
    """Facts of a model file.  What is not known is empty or 0."""

    size_bytes: int = 0
    """Size of all parts."""
    architecture: str = ""
    n_parameters: int = 0
    sizes: ModelSizes | None = None
    has_template: bool = False
    purpose: Purpose = "generate"
    written_at: float = 0.0
    """Seconds since 1970."""

    @property
    def n_embd(self) -> int:
        return 0 if self.sizes is None else self.sizes.n_embd

    def context(self, settings: Model) -> int:
        """About what one request can have, in tokens; of a model that generates nothing, one text."""
        if self.purpose != "generate":
            return min(settings.embedding_ctx, self.sizes.n_ctx_train if self.sizes else settings.embedding_ctx)
        if settings.ctx:
            return settings.ctx if settings.kv_unified == "on" else settings.ctx // settings.parallel
        return DEFAULT_WINDOW if self.sizes is None else min(DEFAULT_WINDOW, self.sizes.n_ctx_train)

    def memory_bytes(self, settings: Model) -> int:
        """About what weights and KV cache take."""
        if self.sizes is None:
            return self.size_bytes
        n_ctx = 0 if self.purpose != "generate" else settings.ctx or self.context(settings) * settings.parallel
        kv_cache = n_ctx * self.sizes.kv_bytes_per_token(with_defaults(settings))
        if settings.kv_mem_limit_mb:
            kv_cache = min(kv_cache, settings.kv_mem_limit_mb * 1e6)
        return round(self.size_bytes + kv_cache)


def read_outline(path: Path) -> ModelOutline:
    """Check and read the header of a model.  A file that cannot be served has an empty outline.

    Blocks for some milliseconds, or up to a fifth of a second for a large vocabulary, once for each file.
    """
    try:
        status = path.stat()
        return _read(path, status.st_mtime, status.st_size)
    except (OSError, GgufError):
        return ModelOutline()


@functools.lru_cache(maxsize=1024)
def _read(path: Path, written_at: float, n_bytes: int) -> ModelOutline:
    summary = check_gguf(path)
    header = read_header(path)
    return ModelOutline(
        size_bytes=summary.size_bytes,
        architecture=summary.architecture,
        n_parameters=sum([math.prod(tensor.shape) for tensor in header.tensors]),
        sizes=summary.sizes,
        purpose=summary.purpose,
        has_template="tokenizer.chat_template" in header.values,
        written_at=written_at,
    )
