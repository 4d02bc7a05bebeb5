"""The messages of vLLM's KV events: batches of msgpack, with the fields and tags that vLLM's subscribers expect.

A batch is an array of its fields, and an event a map with its name as ``type``: vLLM has written both in both ways, and
this is what vllm-router 0.1.17 takes.

Source: ``vllm/distributed/kv_events.py`` of vLLM.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

BLOCK_TOKENS: Final = 16
"""Tokens of a block."""

Medium: TypeAlias = Literal["GPU", "DISK"]
"""Where a block is: in the KV cache of the engine, whatever device that is on, or in the file of a saved state."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Consecutive blocks of one prefix are there now."""

    block_hashes: list[int]
    """Each stands for its block and all blocks before it: 64 bits, the same in all daemons."""
    parent_block_hash: int | None
    """Hash of the block before the first of these; ``None``: they begin a prompt."""
    token_ids: list[int]
    """``[len(block_hashes) * block_size]``."""
    block_size: int
    lora_id: None
    medium: Medium
    lora_name: str | None
    """The adapters that the tokens were computed with, see ``AdapterSet.key``; ``None`` without."""


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks are no longer there."""

    block_hashes: list[int]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block is there."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The payload of one message."""

    ts: float
    """Unix time in seconds."""
    events: list[Event]
    data_parallel_rank: int = 0


_encoder: Final = msgspec.msgpack.Encoder()


def encode(batch: EventBatch) -> bytes:
    """One payload."""
    return _encoder.encode(batch)
