"""JSON and CBOR payloads: bytes to a plain object, and back.

Both decoders accept untrusted bytes.  The result consists of ``dict`` with text keys, ``list``, ``str``, ``int``,
``float``, ``bool``, ``None`` (and ``bytes`` from CBOR): no dates, no shared references, no tags.  Text is valid UTF-8.
CBOR may have token ids as integer keys; they become text, as in JSON.

Sources: RFC 8259 (JSON), RFC 8949 (CBOR).
"""

from __future__ import annotations

import enum
import io
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, NoReturn

import cbor2
import msgspec

from uma_trio.errors import InvalidCbor, InvalidJson

MAX_CBOR_DEPTH: Final = 64

TOKEN_MAPS: Final = frozenset({"logit_bias"})
"""Fields that map token ids to values.  In CBOR their keys may be integers."""

MAX_PAIRS: Final = 4096
"""Limit on the pairs of a CBOR payload, and of each map by token id.

Both are decoded pair by pair on the event loop.  The limit also bounds the cost of integer keys with colliding hashes.
"""


# Initial bytes of CBOR items: RFC 8949, section 3 and appendix B.
_CBOR_MAP_FIRST: Final = 0xA0
_CBOR_MAP_LAST: Final = 0xBF
_INFO_BITS: Final = 0b11111
_FIRST_WIDTH: Final = 24
"""From here to ``_LAST_WIDTH``, the length follows in 1, 2, 4 or 8 bytes; below, this is the length itself."""
_LAST_WIDTH: Final = 27
_INDEFINITE: Final = 31
_BREAK: Final = b"\xff"


class Encoding(enum.Enum):
    """Serialization of a payload.  The daemon answers in the encoding of the request."""

    JSON = "json"
    CBOR = "cbor"


def encoding_of(payload: bytes) -> Encoding:
    """Detect the encoding by the first byte: 0xa0 to 0xbf opens a CBOR map (RFC 8949, 3.1).

    Everything else counts as JSON, because its decoder has the better error messages.
    """
    return Encoding.CBOR if payload and _CBOR_MAP_FIRST <= payload[0] <= _CBOR_MAP_LAST else Encoding.JSON


def decode(payload: bytes, encoding: Encoding) -> dict[str, Any]:
    """Decode ``payload`` to a plain object.

    Raises:
        InvalidJson: not one JSON object in UTF-8 (NaN and Infinity are not JSON), or nested too deeply.
        InvalidCbor: not one CBOR map with text keys, contains a tagged value, or nested too deeply.
    """
    return _decode_json(payload) if encoding is Encoding.JSON else _decode_cbor(payload)


def encode(fields: dict[str, Any], encoding: Encoding) -> bytes:
    """Encode trusted, plain values; the inverse of ``decode``."""
    return _encode_json(fields) if encoding is Encoding.JSON else cbor2.dumps(fields)


_encode_json = msgspec.json.Encoder().encode
_json_decoder = msgspec.json.Decoder()


def _decode_json(payload: bytes) -> dict[str, Any]:
    if not payload:
        raise InvalidJson("the payload is empty")
    try:
        fields = _json_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidJson(str(error)) from None
    except RecursionError:
        raise InvalidJson("the payload is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidJson("the payload is not an object")
    return fields


def _refuse_tag(*_: object) -> NoReturn:
    raise InvalidCbor("tagged values are not part of the protocol")


_BUILT_IN_TAGS: Final = (
    0,
    1,
    2,
    3,
    4,
    5,
    25,
    28,
    29,
    30,
    35,
    36,
    37,
    52,
    54,
    100,
    256,
    258,
    260,
    261,
    1004,
    43000,
    55799,
)
"""Tags that cbor2 decodes by default, such as dates, big numbers and shared references.

With shared references, a few bytes could encode an endless or exponentially large value.
"""


def _decode_cbor(payload: bytes) -> dict[str, Any]:
    stream = io.BytesIO(payload)
    decoder = cbor2.CBORDecoder(
        stream,
        tag_hook=_refuse_tag,
        semantic_decoders=dict.fromkeys(_BUILT_IN_TAGS, _refuse_tag),
        max_depth=MAX_CBOR_DEPTH - 1,
        allow_duplicate_keys=False,
        strict_hashable_types=True,  # a sender can construct other keys so that their hashes collide
        read_size=1,
    )
    if not _at_map(stream):
        raise InvalidCbor("the payload is not a map")
    try:
        fields = _decode_fields(stream, decoder)
    except (cbor2.CBORDecodeError, RecursionError, OverflowError, MemoryError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, InvalidCbor) else error
        raise InvalidCbor(str(cause) or type(cause).__name__) from None
    if stream.tell() != len(payload):
        raise InvalidCbor("more bytes follow the map")
    _check_plain(fields)
    return fields


def _decode_fields(stream: io.BytesIO, decoder: cbor2.CBORDecoder) -> dict[str, Any]:
    """Decode the payload's own map pair by pair.

    cbor2 decodes each value at once, except maps by token id: it would refuse their integer keys.
    """
    fields: dict[str, Any] = {}
    for _ in _pairs(stream):
        name = decoder.decode()
        if type(name) is not str:
            raise InvalidCbor("the keys of the payload must be text")
        if name in fields:
            raise InvalidCbor("the payload contains the same key twice")
        by_token = name in TOKEN_MAPS and _at_map(stream)
        fields[name] = _decode_token_map(name, stream, decoder) if by_token else decoder.decode()
    return fields


def _decode_token_map(name: str, stream: io.BytesIO, decoder: cbor2.CBORDecoder) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in _pairs(stream):
        token = decoder.decode()
        if type(token) not in (int, str):
            raise InvalidCbor(f"the keys of {name} must be token ids, as integers or as text")
        if str(token) in values:
            raise InvalidCbor(f"{name} contains the same token twice")
        values[str(token)] = decoder.decode()
    return values


def _at_map(stream: io.BytesIO) -> bool:
    """Whether the next item is a map."""
    return encoding_of(_next_byte(stream)) is Encoding.CBOR


def _pairs(stream: io.BytesIO) -> Iterator[None]:
    """Consume the header and the end of a map (RFC 8949, 3), and yield before each of its pairs."""
    size = _map_size(stream)
    n = 0
    while n < size if size is not None else not _closed(stream):
        if n == MAX_PAIRS:
            raise InvalidCbor(f"a map has more than {MAX_PAIRS} pairs")
        n += 1
        yield


def _map_size(stream: io.BytesIO) -> int | None:
    """Consume the header of a map and return its number of pairs; ``None`` for an indefinite length."""
    info = stream.read(1)[0] & _INFO_BITS
    if info == _INDEFINITE:
        return None
    if info < _FIRST_WIDTH:
        return info
    if info > _LAST_WIDTH:
        raise InvalidCbor("a map has a reserved length")
    width = 1 << info - _FIRST_WIDTH
    size = stream.read(width)
    if len(size) < width:
        raise InvalidCbor("the payload ends inside the header of a map")
    return int.from_bytes(size, "big")


def _closed(stream: io.BytesIO) -> bool:
    """Consume the end of a map of indefinite length, if it comes next."""
    if _next_byte(stream) != _BREAK:
        return False
    stream.seek(1, io.SEEK_CUR)
    return True


def _next_byte(stream: io.BytesIO) -> bytes:
    """Peek at the next byte; ``b""`` at the end."""
    return bytes(stream.getbuffer()[stream.tell() : stream.tell() + 1])


_TEXT: Final = frozenset({str})
_CONTAINERS: Final = frozenset({dict, list})
_PLAIN: Final = _CONTAINERS | {str, int, float, bool, bytes, type(None)}


def _check_plain(fields: dict[Any, Any]) -> None:
    """Refuse values of other types.

    Looks at the set of types at each depth, not at each value or container: a frame of a million small numbers, or of
    a million empty lists, is checked without a call for each.
    """
    level: list[Any] = [fields]
    while level:
        maps = [container for container in level if type(container) is dict]
        lists = [container for container in level if type(container) is list]
        if not _TEXT.issuperset(map(type, chain.from_iterable(maps))):
            raise InvalidCbor("the keys of a map must be text")
        items = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, maps))]
        kinds = set(map(type, items))
        if not kinds <= _PLAIN:
            strange = min(kind.__name__ for kind in kinds - _PLAIN)
            raise InvalidCbor(f"a value of type {strange} is not part of the protocol")
        level = [] if kinds.isdisjoint(_CONTAINERS) else [item for item in items if item and type(item) in _CONTAINERS]
