"""How a context is to be made: our words for ``llama_context_params``, with their bounds."""

from __future__ import annotations

from typing import Any

import attrs

from llama_abi.types import FLASH_ATTN_TYPE, KV_TYPE

UINT32_MAX = 2**32 - 1
INT32_MAX = 2**31 - 1

KV_TYPES = {name.removeprefix("GGML_TYPE_").lower(): value for name, value in KV_TYPE.items()}
FLASH_ATTN = {
    "auto": FLASH_ATTN_TYPE["LLAMA_FLASH_ATTN_TYPE_AUTO"],
    "off": FLASH_ATTN_TYPE["LLAMA_FLASH_ATTN_TYPE_DISABLED"],
    "on": FLASH_ATTN_TYPE["LLAMA_FLASH_ATTN_TYPE_ENABLED"],
}


def _count(low: int = 0, high: int = UINT32_MAX) -> Any:
    return attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(low), attrs.validators.le(high))


@attrs.frozen(kw_only=True)
class ContextOptions:
    """How a context is made; what it then really has, its properties say."""

    n_ctx: int = attrs.field(default=0, validator=_count())
    """KV cells in all, over all sequences; 0 for as many as the model was trained for."""
    n_batch: int = attrs.field(default=2048, validator=_count(1, INT32_MAX))
    """Most tokens in one decode."""
    n_ubatch: int = attrs.field(default=512, validator=_count(1, INT32_MAX))
    """Most tokens computed at once; a decode of more is cut into several passes."""
    n_seq_max: int = attrs.field(default=1, validator=_count(1))
    """Sequences; ids are in ``[0, n_seq_max)``.  At most ``Library.max_sequences``."""
    n_threads: int = attrs.field(default=1, validator=_count(1, 512))
    """For decodes of one token a sequence."""
    n_threads_batch: int = attrs.field(default=1, validator=_count(1, 512))
    """For decodes with more."""
    kv_unified: bool = False
    """One pool of cells for all sequences, instead of ``n_ctx / n_seq_max`` for each."""
    type_k: str = attrs.field(default="f16", validator=attrs.validators.in_(tuple(KV_TYPES)))
    type_v: str = attrs.field(default="f16", validator=attrs.validators.in_(tuple(KV_TYPES)))
    """A quantized ``type_v`` needs flash attention."""
    flash_attn: str = attrs.field(default="auto", validator=attrs.validators.in_(tuple(FLASH_ATTN)))
    """``auto``, ``on`` or ``off``."""
    offload_kqv: bool = True
    """KV cache and attention on the device."""
    op_offload: bool = True
    """Large prompt passes on the device even where weights are on the host."""
    swa_full: bool = True
    """Have cells for all of a sliding window's past, so that a sequence can be rolled back.  In a unified cache others
    may take those behind its window all the same: ``seq_pos_min`` says what is left."""
    n_outputs_max: int = attrs.field(default=0, validator=_count())
    """Most rows of logits in one pass; 0 for ``n_batch``.  Fewer save memory; more than it abort."""
    n_outputs_max_per_seq: int = attrs.field(default=0, validator=_count())
    """The same for one sequence; 0 for ``n_outputs_max``."""
    n_rs_seq: int = attrs.field(default=0, validator=_count())
    """Tokens that a recurrent state can be rolled back by, once between two decodes, if the last pass had more than those
    of the sequence: where it had fewer, ``seq_remove`` does not notice.  0 for architectures that keep no snapshots."""

    def c_params(self, c: Any) -> Any:
        """A ``llama_context_params``: llama.cpp's defaults, and these on top."""
        params = c.llama_context_default_params()
        for name, value in attrs.asdict(self).items():
            if name in ("type_k", "type_v"):
                setattr(params, name, KV_TYPES[value])
            elif name == "flash_attn":
                params.flash_attn_type = FLASH_ATTN[value]
            else:
                setattr(params, name, value)
        return params
