"""Options of a context: ``llama_context_params`` with bounds that are checked in Python."""

from __future__ import annotations

from typing import Any

import attrs

from llama_abi.types import FLASH_ATTN_TYPE, KV_TYPE, POOLING_TYPE

UINT32_MAX = 2**32 - 1
INT32_MAX = 2**31 - 1

KV_TYPES = {name.removeprefix("GGML_TYPE_").lower(): value for name, value in KV_TYPE.items()}
FLASH_ATTN = {
    "auto": FLASH_ATTN_TYPE["LLAMA_FLASH_ATTN_TYPE_AUTO"],
    "off": FLASH_ATTN_TYPE["LLAMA_FLASH_ATTN_TYPE_DISABLED"],
    "on": FLASH_ATTN_TYPE["LLAMA_FLASH_ATTN_TYPE_ENABLED"],
}
POOLING = {name.removeprefix("LLAMA_POOLING_TYPE_").lower(): value for name, value in POOLING_TYPE.items()}


def _count(low: int = 0, high: int = UINT32_MAX) -> Any:
    return attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(low), attrs.validators.le(high))


@attrs.frozen(kw_only=True)
class ContextOptions:
    """Options of a context. llama.cpp may round some of them; the context's properties have the final values."""

    n_ctx: int = attrs.field(default=0, validator=_count())
    """KV cells for all sequences together; 0 for the model's training context."""
    n_batch: int = attrs.field(default=2048, validator=_count(1, INT32_MAX))
    """Most tokens in one decode."""
    n_ubatch: int = attrs.field(default=512, validator=_count(1, INT32_MAX))
    """Most tokens in one pass over the weights. A larger decode takes several passes."""
    n_seq_max: int = attrs.field(default=1, validator=_count(1))
    """Number of sequences, at most ``Library.max_sequences``. Ids are in ``[0, n_seq_max)``."""
    n_threads: int = attrs.field(default=1, validator=_count(1, 512))
    """Compute threads for decodes with one token per sequence."""
    n_threads_batch: int = attrs.field(default=1, validator=_count(1, 512))
    """Compute threads for larger decodes."""
    kv_unified: bool = False
    """Share all KV cells between the sequences, instead of ``n_ctx / n_seq_max`` cells for each."""
    type_k: str = attrs.field(default="f16", validator=attrs.validators.in_(tuple(KV_TYPES)))
    """Type of the keys in the KV cache, from ``KV_TYPES``."""
    type_v: str = attrs.field(default="f16", validator=attrs.validators.in_(tuple(KV_TYPES)))
    """Type of the values in the KV cache. A quantized type needs flash attention."""
    flash_attn: str = attrs.field(default="auto", validator=attrs.validators.in_(tuple(FLASH_ATTN)))
    """``auto``, ``on`` or ``off``."""
    embeddings: bool = False
    """Compute embeddings of all tokens as well as logits."""
    pooling: str = attrs.field(default="unspecified", validator=attrs.validators.in_(tuple(POOLING)))
    """How the embeddings of a sequence's tokens become one, from ``POOLING``. ``none``: they do not. ``unspecified``:
    as the model says. llama.cpp pools over the tokens of one pass, so a sequence must fit into ``n_ubatch``."""
    offload_kqv: bool = True
    """Put the KV cache and attention on the device."""
    op_offload: bool = True
    """Compute large prefill passes on the device even where the weights are on the host."""
    swa_full: bool = True
    """Keep cells for the whole past of sliding-window layers, so that a sequence can be truncated. In a unified cache
    other sequences may still take the cells behind a window; ``seq_pos_min`` gives the lowest position left."""
    n_outputs_max: int = attrs.field(default=0, validator=_count())
    """Most rows of logits in one pass; 0 for ``n_batch``. A lower limit saves memory. ``decode`` enforces it."""
    n_outputs_max_per_seq: int = attrs.field(default=0, validator=_count())
    """Most rows of logits in one pass for one sequence; 0 for ``n_outputs_max``."""
    n_rs_seq: int = attrs.field(default=0, validator=_count())
    """Most tokens that a recurrent state can be rolled back by, once between two decodes. The last pass must have had
    more tokens of the sequence than that; ``seq_remove`` does not notice if it had fewer. llama.cpp sets it to 0 for
    architectures without such snapshots."""

    def c_params(self, c: Any) -> Any:
        """Make a ``llama_context_params``: llama.cpp's defaults, overwritten with these options."""
        params = c.llama_context_default_params()
        for name, value in attrs.asdict(self).items():
            if name in ("type_k", "type_v"):
                setattr(params, name, KV_TYPES[value])
            elif name == "flash_attn":
                params.flash_attn_type = FLASH_ATTN[value]
            elif name == "pooling":
                params.pooling_type = POOLING[value]
            else:
                setattr(params, name, value)
        return params
