"""Cases for the fuzzer: bytes that a client might send, from almost valid to noise.

A case depends on its random generator alone, so a seed and a number identify it.
"""

from __future__ import annotations

import json
import math
import struct
from random import Random
from typing import Any

import cbor2

CAP = 1 << 16
"""``max_frame_bytes`` of the fuzzed codecs and daemon."""

FIELDS = (
    *("id", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos"),
    *("stream", "echo", "keep_alive", "cache_prompt", "speculate", "slo", "metadata", "event", "type", "unknown", ""),
    *("n", "min_p", "repetition_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("logprobs", "stop_token_ids", "return_full_text", "parse_special", "session_id", "n_keep", "model", "principal"),
    *("principal_weight", "principal_max_requests", "text", "tokens", "add_special", "input", "dimensions"),
)  # fmt: skip
INTERESTING = (
    *(None, True, False, 0, 1, -1, 2, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1.5, "", "a", "cancel", "generate", "metrics", "tokenize", "embed", "models", "health", "user", "interactive"),
    *("é", "🦊", "\0", "\u2028", "\ufeff", "x" * 300, [], {}, [[]], {"k": "v"}, [None], ["a"] * 17),
)  # fmt: skip
BYTES = b'\0\x01{}[]",:\\\xff\xa0\xbf\x9f\xc0\xfb\x7f\x80\xed'


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def value(rng: Random, depth: int = 0) -> Any:
    """Return any JSON value."""
    kind = rng.random()
    if kind < 0.5 or depth > 3:
        return rng.choice(INTERESTING)
    if kind < 0.6:
        return rng.randint(-(2 ** rng.randint(1, 70)), 2 ** rng.randint(1, 70))
    if kind < 0.7:
        return rng.uniform(-10, 10) * 10 ** rng.randint(-5, 5)
    if kind < 0.85:
        return text(rng)
    if kind < 0.93:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def text(rng: Random) -> str:
    return "".join(rng.choice('ab \n\0"\\é🦊日\x7f\u202e') for _ in range(rng.randint(0, 12)))


def request(rng: Random) -> dict[str, Any]:
    """Return a valid request, short enough to be served many times."""
    fields: dict[str, Any] = {"id": rng.choice(("a", "b", "é", "r" * 256)), "max_tokens": rng.randint(1, 4)}
    if rng.random() < 0.8:
        fields["prompt"] = rng.choice(("Hello", "x", "Tell me a story", "🦊 é", text(rng) or "y"))
    else:
        fields["messages"] = [{"role": rng.choice(("user", "system", "assistant")), "content": text(rng)}]
    for name, some in (
        ("temperature", (0, 0.7, 1.5, 100)),
        ("top_p", (1e-9, 0.5, 1)),
        ("top_k", (0, 1, 40, 2**31 - 1)),
        ("n", (1, 2, 16)),
        ("min_p", (0, 0.1, 1)),
        ("repetition_penalty", (0.1, 1.1, 10)),
        ("repeat_last_n", (0, 1, 4096)),
        ("frequency_penalty", (-2, 0.5)),
        ("presence_penalty", (0.5, 2)),
        ("logit_bias", ({}, {"0": -100, "5": 100}, {"999999": 1}, {"x": 1}, {5: 1})),
        ("logprobs", (0, 3, 20)),
        ("stop_token_ids", ([], [0, 5], [2**31 - 1])),
        ("seed", (0, 7, 2**63 - 1)),
        ("stop", ("e", ["a", "b"], [])),
        *(
            (flag, (True, False))
            for flag in ("ignore_eos", "stream", "echo", "keep_alive", "cache_prompt", "speculate", "parse_special")
        ),
        ("slo", ({}, {"priority": "background"}, {"target_ttft_ms": 5, "target_itl_ms": 1.5})),
        ("metadata", ({}, {"k": [1, "é", None]}, {"deep": [[[[]]]]})),
    ):
        if rng.random() < 0.15:
            fields[name] = rng.choice(some)
    return fields


def message(rng: Random) -> dict[str, Any]:
    """Return a request, a cancel or a metrics query; every other one is probably invalid."""
    kind = rng.random()
    if kind < 0.8:
        fields = request(rng)
    elif kind < 0.9:
        fields = {"event": "cancel", "id": rng.choice(("a", "b", "nobody"))}
    else:
        fields = {"type": "metrics", "keep_alive": rng.random() < 0.5}
    while rng.random() < 0.4:
        fields[rng.choice(FIELDS)] = value(rng)
    if rng.random() < 0.1 and fields:
        del fields[rng.choice(list(fields))]
    return fields


def payload(rng: Random) -> bytes:
    fields = message(rng)
    if rng.random() < 0.5:
        data = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    else:
        if rng.random() < 0.1:
            fields[rng.choice(FIELDS)] = rng.choice(
                (math.nan, math.inf, b"\xff", 1 << 80, cbor2.CBORTag(1, 0), cbor2.undefined)
            )
        data = cbor2.dumps(fields)
    return mutated(rng, data) if rng.random() < 0.4 else data


def mutated(rng: Random, data: bytes) -> bytes:
    """Change, remove, repeat or insert some bytes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(found) + 1)
        kind = rng.random()
        if kind < 0.35 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind < 0.6:
            found[at:at] = bytes(rng.choices(BYTES, k=rng.randint(1, 4)))
        elif kind < 0.8:
            del found[at : at + rng.choice((1, 1, 2, 8, 64))]
        elif kind < 0.9:
            found[at:at] = found[max(0, at - rng.randint(1, 16)) : at]
        else:
            found[at:at] = bytes(rng.choices(BYTES, k=1)) * rng.choice((10, 100, 2000))
    return bytes(found)


def case(rng: Random) -> bytes:
    """Return all that one client sends."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.choice((0, 1, 3, 4, 5, 40, 400, 4000)))
    if kind < 0.1:
        length = rng.choice((0, 1, CAP - 1, CAP, CAP + 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
        return struct.pack("<I", length) + rng.randbytes(rng.randint(0, 50))
    frames = b"".join(frame(payload(rng)) for _ in range(rng.choice((1, 1, 1, 2, 4))))
    if rng.random() < 0.15:
        frames = mutated(rng, frames)
    if rng.random() < 0.1:
        frames = frames[: rng.randrange(len(frames) + 1)]
    return frames


def chunks(rng: Random, data: bytes) -> list[bytes]:
    """Split ``data`` at random places, as a socket may."""
    size = rng.choice((1, 2, 3, 5, 64, 4096))
    if size < 5 and len(data) > 3000:
        size = 64
    found, at = [], 0
    while at < len(data):
        n = rng.randint(1, size)
        found.append(data[at : at + n])
        at += n
    return found
