"""What a model's file says, without loading it: for lists of models, and to see whether there is room for one."""

from __future__ import annotations

from pathlib import Path

import attrs

from uma_trio.config import Model
from uma_trio.engine.fit import ModelSizes, with_defaults
from uma_trio.engine.layout import DEFAULT_WINDOW
from uma_trio.models.gguf_header import GgufError, read_header
from uma_trio.models.gguf_split import parts_of
from uma_trio.models.sizes import sizes_of


@attrs.frozen(kw_only=True)
class ModelOutline:
    """Facts of a model file.  What is not known is empty or 0."""

    size_bytes: int = 0
    """Size of all parts."""
    architecture: str = ""
    n_parameters: int = 0
    sizes: ModelSizes | None = None
    has_template: bool = False
    written_at: float = 0.0
    """Seconds since 1970."""

    @property
    def n_embd(self) -> int:
        return 0 if self.sizes is None else self.sizes.n_embd

    def context(self, settings: Model) -> int:
        """About what one request can have, in tokens."""
        if settings.ctx:
            return settings.ctx if settings.kv_unified == "on" else settings.ctx // settings.parallel
        return DEFAULT_WINDOW if self.sizes is None else min(DEFAULT_WINDOW, self.sizes.n_ctx_train)

    def memory_bytes(self, settings: Model) -> int:
        """About what weights and KV cache take."""
        if self.sizes is None:
            return self.size_bytes
        n_ctx = settings.ctx or self.context(settings) * settings.parallel
        kv_cache = n_ctx * self.sizes.kv_bytes_per_token(with_defaults(settings))
        if settings.kv_mem_limit_mb:
            kv_cache = min(kv_cache, settings.kv_mem_limit_mb * 1e6)
        return round(self.size_bytes + kv_cache)


def read_outline(path: Path) -> ModelOutline:
    """Read the header of a model.  A file that is no model has an empty outline.  Blocks for some milliseconds."""
    try:
        header = read_header(path)
        size = sum([each.stat().st_size for each in parts_of(path, header.n_parts)])
        written_at = path.stat().st_mtime
        sizes = sizes_of(header)
    except (OSError, GgufError):
        return ModelOutline()
    n_parameters = 0
    for tensor in header.tensors:
        n = 1
        for length in tensor.shape:
            n *= length
        n_parameters += n
    return ModelOutline(
        size_bytes=size,
        architecture=header.text("general.architecture"),
        n_parameters=n_parameters,
        sizes=sizes,
        has_template="tokenizer.chat_template" in header.values,
        written_at=written_at,
    )
