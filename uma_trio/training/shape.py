"""The dimensions of the model.  Numbers only, so tests and the exporter do not need torch."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Shape:
    """A Llama: RMSNorm, grouped-query attention, rotary positions in adjacent pairs, SwiGLU, tied embeddings."""

    n_vocab: int = 2048
    n_embd: int = 256
    n_layer: int = 9
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 704
    context: int = 8192
    rope_base: float = 50_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """64, the smallest size that the flash attention kernels of all backends support."""
        return self.n_embd // self.n_head

    @property
    def parameters(self) -> int:
        attention = 2 * self.n_embd * self.n_embd + 2 * self.n_embd * self.n_head_kv * self.head_dim
        layer = attention + 3 * self.n_embd * self.n_ff + 2 * self.n_embd
        return self.n_vocab * self.n_embd + self.n_layer * layer + self.n_embd


@attrs.frozen(kw_only=True)
class TowerShape:
    """Dimensions of a projector."""

    side: int = 56
    """Pixels of a picture, in width and in height."""
    patch: int = 14
    width: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_ff: int = 512

    @property
    def n_rows(self) -> int:
        """Rows of a picture: as many as patches."""
        return int((self.side // self.patch) ** 2)


SHIPPED = Shape()
DRAFT = Shape(n_embd=192, n_layer=2, n_head=3, n_head_kv=1, n_ff=512)
"""The draft model of the embedded one, with the same vocabulary and context.  A step of a model so small is mostly
overhead of its layers, so it is rather wide than deep."""

SMOKE = Shape(n_vocab=512, n_embd=64, n_layer=2, n_head=2, n_head_kv=1, n_ff=96, context=1024)
"""Too small to learn anything.  Runs the whole script in under a minute on a CPU."""
