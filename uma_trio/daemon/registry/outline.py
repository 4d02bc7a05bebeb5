"""What a model's file says, without loading it: for lists of models, and to see whether there is room for one."""

from __future__ import annotations

import functools
from pathlib import Path

import attrs

from uma_trio.config import Model
from uma_trio.engine_link.defaults import DEFAULT_WINDOW, with_defaults
from uma_trio.models.gguf_check import GgufError, GgufSummary, check_gguf


@attrs.frozen
class ModelOutline:
    """A model that is not loaded."""

    summary: GgufSummary
    """What is not known of it is empty or 0."""
    written_at: float = 0.0
    """Seconds since 1970."""

    def context(self, settings: Model) -> int:
        """About what one request can have, in tokens; of a model that generates nothing, one text."""
        sizes = self.summary.sizes
        if self.summary.purpose != "generate":
            return min(settings.embedding_ctx, sizes.n_ctx_train if sizes else settings.embedding_ctx)
        if settings.ctx:
            return settings.ctx if settings.kv_unified == "on" else settings.ctx // settings.parallel
        return DEFAULT_WINDOW if sizes is None else min(DEFAULT_WINDOW, sizes.n_ctx_train)

    def memory_bytes(self, settings: Model) -> int:
        """About what weights and KV cache take."""
        sizes, size_bytes = self.summary.sizes, self.summary.size_bytes
        if sizes is None:
            return size_bytes
        n_ctx = 0 if self.summary.purpose != "generate" else settings.ctx or self.context(settings) * settings.parallel
        kv_cache = n_ctx * sizes.kv_bytes_per_token(with_defaults(settings))
        if settings.kv_mem_limit_mb:
            kv_cache = min(kv_cache, settings.kv_mem_limit_mb * 1e6)
        return round(size_bytes + kv_cache)


def read_outline(path: Path) -> ModelOutline:
    """Check the header of a model.  A file that cannot be served has an empty outline.

    Blocks for some milliseconds, or up to a fifth of a second for a large vocabulary, once for each file.
    """
    try:
        status = path.stat()
        return _read(path, status.st_mtime, status.st_size)
    except (OSError, GgufError):
        return ModelOutline(GgufSummary())


@functools.lru_cache(maxsize=1024)
def _read(path: Path, written_at: float, n_bytes: int) -> ModelOutline:
    return ModelOutline(check_gguf(path), written_at)
