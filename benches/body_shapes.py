"""Bodies and frames that are large, or dear to decode, in as many shapes as a gateway and a daemon may meet."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import attrs

MIB: Final = 1 << 20
LARGE: Final = 4 * MIB - 4096
"""Just within the gateway's default limit."""


@attrs.frozen
class Shape:
    """A request by what its body has."""

    name: str
    path: str
    body: Callable[[], bytes]
    method: str = "POST"


def _filled(begin: str, item: str, end: str, n_bytes: int = LARGE, separator: str = ",") -> Callable[[], bytes]:
    """A body with as many of ``item`` as fit.  ``#`` in it is a number that counts."""

    def body() -> bytes:
        n = (n_bytes - len(begin) - len(end)) // (len(item.replace("#", "1234567")) + len(separator))
        items = (item.replace("#", f"{1_000_000 + i}") for i in range(n)) if "#" in item else [item] * n
        return (begin + separator.join(items) + end).encode()

    return body


def _prompt(name: str, item: str, separator: str = ",") -> Shape:
    """A prompt that is a list of ``item``."""
    return Shape(
        f"prompt: {name}", "/v1/completions", _filled('{"max_tokens":1,"prompt":[', item, "]}", LARGE, separator)
    )


def _embeddings(texts: list[str] | list[list[int]]) -> Callable[[], bytes]:
    return lambda: json.dumps({"input": texts}).encode()


CHAT: Final = "/v1/chat/completions"
MESSAGE: Final = '"messages":[{"role":"user","content":"hi"}],"max_tokens":1'
CALL: Final = r'{"type":"function","function":{"name":"f","arguments":"{\"a\":[#]}"}}'

SHAPES: Final = (
    Shape("nothing", "/healthz", lambda: b"", "GET"),
    Shape("one text", "/v1/completions", _filled('{"max_tokens":1,"prompt":"', "The fox, Ada. ", '"}', separator="")),
    Shape("a text of escapes", "/v1/completions", _filled('{"max_tokens":1,"prompt":"', "\\n", '"}', separator="")),
    Shape("blanks", "/v1/completions", _filled('{"max_tokens":1,"prompt":', " ", '"a"}', separator="")),
    _prompt("ids of 1 digit", "1"),
    _prompt("ids of 5 digits", "12345"),
    _prompt("ids and texts", '1,"a"'),
    _prompt("texts", '"a"'),
    _prompt("empty lists", "[]"),
    _prompt("lists of lists", "[[[[[[[[1]]]]]]]]"),
    _prompt("objects", '{"a":1}'),
    _prompt("1e300", "1e300"),
    _prompt("numbers of 4,000 digits", "9" * 4000),
    _prompt("quotes", '"', ""),
    Shape("/completion: ids and texts", "/completion", _filled('{"n_predict":1,"prompt":[', '1,"a"', "]}")),
    Shape("unknown fields", CHAT, _filled("{" + MESSAGE + ",", '"x#":1', "}")),
    Shape("unknown options", "/api/chat", _filled("{" + MESSAGE + ',"options":{', '"x#":1', "}}")),
    Shape("messages", CHAT, _filled('{"max_tokens":1,"messages":[', '{"role":"user","content":"hi"}', "]}")),
    Shape("tools", CHAT, _filled("{" + MESSAGE + ',"tools":[', '{"type":"function","function":{"name":"f#"}}', "]}")),
    Shape(
        "arguments: lists",
        CHAT,
        _filled('{"messages":[{"role":"assistant","tool_calls":[', CALL.replace("#", "[]," * 3000 + "1"), "]}]}"),
    ),
    Shape(
        "arguments: 1e300",
        CHAT,
        _filled('{"messages":[{"role":"assistant","tool_calls":[', CALL.replace("#", "1e300," * 1360 + "1"), "]}]}"),
    ),
    Shape("stop", CHAT, _filled("{" + MESSAGE + ',"stop":[', '"a"', "]}")),
    Shape("logit_bias", CHAT, _filled("{" + MESSAGE + ',"logit_bias":{', '"#":1', "}}")),
    Shape("metadata", CHAT, _filled("{" + MESSAGE + ',"metadata":{', '"#":[[],{}]', "}}")),
    Shape("a schema", CHAT, _filled("{" + MESSAGE + ',"json_schema":{"enum":[', '"a#"', "]}}")),
    Shape("rerank", "/v1/rerank", _filled('{"query":"a","documents":[', '"a"', "]}")),
    Shape("/detokenize", "/detokenize", _filled('{"tokens":[', "300", "]}", 2 * MIB)),
    Shape("/tokenize", "/tokenize", _filled('{"content":"', "The fox, Ada. ", '"}', 2 * MIB - 4096, separator="")),
    Shape("/detokenize: 100,000 ids", "/detokenize", _filled('{"tokens":[', "300", "]}", 400_000)),
    Shape(
        "/tokenize: 250 KB, with pieces",
        "/tokenize",
        _filled('{"with_pieces":true,"content":"', "The fox, Ada. ", '"}', 250_000, separator=""),
    ),
    Shape("embeddings: 2,048 x 500 ids", "/v1/embeddings", _embeddings([[5] * 500] * 2048)),
    Shape("embeddings: 2,048 x 200 ids", "/v1/embeddings", _embeddings([[5] * 200] * 2048)),
    Shape("embeddings: 2,048 x 800 characters", "/v1/embeddings", _embeddings(["The fox. " * 89] * 2048)),
    Shape("embeddings: 2,048 words", "/v1/embeddings", _embeddings(["fox"] * 2048)),
)


@attrs.frozen
class Frame:
    """A message on the socket by what it has."""

    name: str
    payload: Callable[[], bytes]


SMALL_FRAME: Final = 2 * MIB
"""The daemon's default limit."""


def _cbor(fields: bytes, item: bytes, n_bytes: int = SMALL_FRAME - 64) -> Callable[[], bytes]:
    """A map that ends with a list of as many of ``item`` as fit."""
    n = n_bytes // len(item)
    return lambda: fields + b"\x9a" + n.to_bytes(4, "big") + item * n


X: Final = b"\xa1\x61x"
EMBED: Final = b"\xa2\x64type\x65embed\x65input"

FRAMES: Final = (
    Frame("CBOR: empty lists", _cbor(X, b"\x80")),
    Frame("CBOR: lists of lists", _cbor(X, b"\x81" * 50 + b"\x01")),
    Frame("CBOR: small numbers", _cbor(X, b"\x01")),
    Frame("CBOR: simple values", _cbor(X, b"\xe0")),
    Frame("CBOR: 800 x 200 ids", _cbor(EMBED, b"\x98\xc8" + b"\x05" * 200, 800 * 202)),
    Frame("JSON: empty lists", _filled('{"x":[', "[]", "]}", SMALL_FRAME)),
    Frame("JSON: 2,048 x 200 ids", lambda: json.dumps({"type": "embed", "input": [[5] * 200] * 2048}).encode()),
    Frame(
        "JSON: tools of numbers",
        _filled(
            f'{{"id":"a",{MESSAGE.partition("],")[0]}],"tools":[{{"name":"f","parameters":{{"enum":[',
            "1.5",
            "]}}]}",
            SMALL_FRAME - 4096,
        ),
    ),
)
