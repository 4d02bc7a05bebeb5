"""How many bytes a tick moves between memory and processor, estimated from what it holds.

Decoding is bound by memory: each token reads all weights, a share of them where a batch shares the reading, and the
keys and values of everything before it.  What a tick moved, over how long it took, beside what the memory can do, says
how far the device is from its limit, whatever the model and the batch.

An estimate: caches are left out, so it is too high for models that fit into them; and what lies between layers is
counted as if each of some twelve vectors a layer were written and read once.
"""

from __future__ import annotations

from typing import Final

import attrs

VECTORS_A_LAYER: Final = 12
"""Of the width of the model: norms, q, k, v, attention's output, the wider ones of the feed-forward block."""

BYTES_PER_ACTIVATION: Final = 8
"""A float32, written and read."""


@attrs.frozen
class Weight:
    """What of a model decides how much its ticks move."""

    weights_bytes: int
    kv_bytes_per_token: float
    n_layer: int
    n_embd: int
    n_vocab: int


def bytes_moved(model: Weight, *, calls: int, tokens: int, outputs: int, context_read: float) -> float:
    """By one tick.

    Args:
        calls: of ``llama_decode``; each reads all weights.
        tokens: in all of them: their keys and values are written, and all that lies between layers.
        outputs: tokens of them whose logits were asked for.
        context_read: tokens whose keys and values were read, once for each that read them.
    """
    weights = calls * model.weights_bytes
    kv = model.kv_bytes_per_token * (context_read + tokens)
    between = tokens * model.n_layer * model.n_embd * VECTORS_A_LAYER * BYTES_PER_ACTIVATION
    return weights + kv + between + outputs * model.n_vocab * 4.0
