"""What a model is for: it generates text, embeds texts, or ranks documents.

Only a model with causal attention generates.  The others compute whole texts.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Purpose: TypeAlias = Literal["generate", "embed", "rank"]

IN_WORDS: Final[dict[Purpose, str]] = {
    "generate": "generates text",
    "embed": "embeds texts",
    "rank": "ranks documents for a query",
}
"""What a model does, as the end of a sentence."""

ENCODERS: Final = frozenset({
    "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "nomic-bert",
    "nomic-bert-moe",
})  # fmt: skip
"""Architectures that have no KV cache, and attend to the whole text."""

POOLING: Final = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""``pooling_type`` in the metadata of a model: ``llama_pooling_type``."""

HEADS: Final = ("cls.weight", "cls.output.weight")
"""Tensors of a classification head; a model that ranks has one of them at least."""


def purpose_of(architecture: str, pooling_type: int | None, *, is_causal: bool, has_head: bool) -> Purpose:
    """What a model is for.

    Args:
        pooling_type: of the metadata; ``None`` where they have none.
        is_causal: what the metadata say; ``True`` where they say nothing.
        has_head: it has a classification head.
    """
    if POOLING.get(pooling_type or 0) == "rank" and has_head:
        return "rank"
    return "generate" if is_causal and architecture not in ENCODERS else "embed"
