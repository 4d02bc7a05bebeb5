"""JSON and CBOR payloads: bytes to a plain object, and back.

Both decoders take untrusted bytes.  What comes out is made of ``dict`` with text keys, ``list``,
``str``, ``int``, ``float``, ``bool``, ``None`` (and ``bytes`` and inner maps with keys of ``int`` from CBOR)
and nothing else: no dates, no shared references, no tags.  Text is valid UTF-8.

Sources: RFC 8259 (JSON), RFC 8949 (CBOR).
"""

from __future__ import annotations

import enum
import io
from typing import Any, Final, NoReturn

import cbor2
import msgspec

from uma_trio.errors import InvalidCbor, InvalidJson

MAX_CBOR_DEPTH: Final = 64


class Encoding(enum.Enum):
    """How payloads are written; an answer uses the encoding of its question."""

    JSON = "json"
    CBOR = "cbor"


def encoding_of(payload: bytes) -> Encoding:
    """JSON or CBOR, told by the first byte: 0xa0 to 0xbf opens a CBOR map (RFC 8949, 3.1).

    Anything else is taken for JSON, whose decoder then has the better error message.
    """
    return Encoding.CBOR if payload and 0xA0 <= payload[0] <= 0xBF else Encoding.JSON


def decode(payload: bytes, encoding: Encoding) -> dict[str, Any]:
    """The object in ``payload``.

    Raises:
        InvalidJson: not one JSON object in UTF-8 (NaN and Infinity are no JSON), or too deep.
        InvalidCbor: not one CBOR map with text keys, a tagged value, or too deep.
    """
    return _decode_json(payload) if encoding is Encoding.JSON else _decode_cbor(payload)


def encode(fields: dict[str, Any], encoding: Encoding) -> bytes:
    """The inverse of ``decode``; ``fields`` is our own and of plain values."""
    return _encode_json(fields) if encoding is Encoding.JSON else cbor2.dumps(fields)


_encode_json = msgspec.json.Encoder().encode
_json_decoder = msgspec.json.Decoder()


def _decode_json(payload: bytes) -> dict[str, Any]:
    if not payload:
        raise InvalidJson("the payload is empty")
    try:
        found = _json_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidJson(str(error)) from None
    except RecursionError:
        raise InvalidJson("the payload is nested too deeply") from None
    if not isinstance(found, dict):
        raise InvalidJson("the payload is not an object")
    return found


def _refuse_tag(*_: object) -> NoReturn:
    raise InvalidCbor("tagged values are not part of the protocol")


_BUILT_IN_TAGS: Final = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799)
"""Tags that cbor2 would decode: dates, big numbers, and shared references, with which a few bytes
could spell an endless or an exponentially large value."""


def _decode_cbor(payload: bytes) -> dict[str, Any]:
    stream = io.BytesIO(payload)
    try:
        found = cbor2.CBORDecoder(
            stream,
            tag_hook=_refuse_tag,
            semantic_decoders=dict.fromkeys(_BUILT_IN_TAGS, _refuse_tag),
            max_depth=MAX_CBOR_DEPTH,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
            read_size=1,
        ).decode()
    except (cbor2.CBORDecodeError, RecursionError, OverflowError, MemoryError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, InvalidCbor) else error
        raise InvalidCbor(str(cause) or type(cause).__name__) from None
    if not isinstance(found, dict):
        raise InvalidCbor("the payload is not a map")
    if stream.tell() != len(payload):
        raise InvalidCbor("more bytes follow after the map")
    _check_plain(found)
    return found


_TEXT: Final = frozenset({str})
_KEYS: Final = frozenset({str, int})
_CONTAINERS: Final = frozenset({dict, list})
_PLAIN: Final = _CONTAINERS | {str, int, float, bool, bytes, type(None)}


def _check_plain(found: dict[Any, Any]) -> None:
    """Looks at kinds and not at values: a frame of a million small numbers takes milliseconds."""
    waiting: list[Any] = [found]
    while waiting:
        container = waiting.pop()
        items = container
        if type(container) is dict:
            allowed = _TEXT if container is found else _KEYS
            if not allowed.issuperset(map(type, container)):
                raise InvalidCbor("the keys of a map must be text, or inside it text and whole numbers")
            items = container.values()
        kinds = set(map(type, items))
        if not kinds <= _PLAIN:
            strange = min(kind.__name__ for kind in kinds - _PLAIN)
            raise InvalidCbor(f"a value of the kind {strange} is not part of the protocol")
        if not kinds.isdisjoint(_CONTAINERS):
            waiting.extend(item for item in items if type(item) in _CONTAINERS)
