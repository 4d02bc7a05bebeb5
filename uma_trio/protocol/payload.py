"""JSON and CBOR payloads: bytes to a plain object, and back.

Both decoders take untrusted bytes.  What comes out is made of ``dict`` with text keys, ``list``,
``str``, ``int``, ``float``, ``bool``, ``None`` (and ``bytes`` from CBOR) and nothing else: no dates, no
shared references, no tags.  Text is valid UTF-8.  Token ids that are keys in CBOR become text, as they are in JSON.

Sources: RFC 8259 (JSON), RFC 8949 (CBOR).
"""

from __future__ import annotations

import enum
import io
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import cbor2
import msgspec

from uma_trio.errors import InvalidCbor, InvalidJson

MAX_CBOR_DEPTH: Final = 64

TOKEN_MAPS: Final = frozenset({"logit_bias"})
"""Fields that are maps by token id, whose keys may be whole numbers in CBOR."""

MAX_PAIRS: Final = 4096
"""Of a CBOR payload, and of each of its maps by token id: they are read pair by pair, on the event loop."""


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
"""Tags that cbor2 would decode: dates, big numbers, and shared references, with which a few bytes
could spell an endless or an exponentially large value."""


def _decode_cbor(payload: bytes) -> dict[str, Any]:
    stream = io.BytesIO(payload)
    decoder = cbor2.CBORDecoder(
        stream,
        tag_hook=_refuse_tag,
        semantic_decoders=dict.fromkeys(_BUILT_IN_TAGS, _refuse_tag),
        max_depth=MAX_CBOR_DEPTH - 1,
        allow_duplicate_keys=False,
        strict_hashable_types=True,  # of other keys anybody can make many that collide
        read_size=1,
    )
    if not _at_map(stream):
        raise InvalidCbor("the payload is not a map")
    try:
        found = _decode_fields(stream, decoder)
    except (cbor2.CBORDecodeError, RecursionError, OverflowError, MemoryError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, InvalidCbor) else error
        raise InvalidCbor(str(cause) or type(cause).__name__) from None
    if stream.tell() != len(payload):
        raise InvalidCbor("more bytes follow after the map")
    _check_plain(found)
    return found


def _decode_fields(stream: io.BytesIO, decoder: cbor2.CBORDecoder) -> dict[str, Any]:
    """The map that ``stream`` is at, pair by pair; what is in a pair, all at once, but for maps by token id."""
    found: dict[str, Any] = {}
    for _ in _pairs(stream):
        name = decoder.decode()
        if type(name) is not str:
            raise InvalidCbor("the keys of the payload must be text")
        if name in found:
            raise InvalidCbor("the payload has the same key twice")
        by_token = name in TOKEN_MAPS and _at_map(stream)
        found[name] = _decode_by_token(name, stream, decoder) if by_token else decoder.decode()
    return found


def _decode_by_token(name: str, stream: io.BytesIO, decoder: cbor2.CBORDecoder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in _pairs(stream):
        token = decoder.decode()
        if type(token) not in (int, str):
            raise InvalidCbor(f"the keys of {name} must be token ids: whole numbers, or these as text")
        if str(token) in found:
            raise InvalidCbor(f"{name} has the same token twice")
        found[str(token)] = decoder.decode()
    return found


def _at_map(stream: io.BytesIO) -> bool:
    """What comes next opens a map."""
    return encoding_of(_next_byte(stream)) is Encoding.CBOR


def _pairs(stream: io.BytesIO) -> Iterator[None]:
    """Read what opens and what closes a map (RFC 8949, 3), and stop before each of its pairs."""
    size = _map_size(stream)
    n = 0
    while n < size if size is not None else not _closed(stream):
        if n == MAX_PAIRS:
            raise InvalidCbor(f"a map of more than {MAX_PAIRS} pairs")
        n += 1
        yield


def _map_size(stream: io.BytesIO) -> int | None:
    """How many pairs the map has that begins here; ``None`` for an indefinite length."""
    told = stream.read(1)[0] & 31
    if told == _INDEFINITE:
        return None
    if told < 24:
        return told
    if told > 27:
        raise InvalidCbor("a map of a reserved length")
    width = 1 << told - 24
    size = stream.read(width)
    if len(size) < width:
        raise InvalidCbor("it ends where a map begins")
    return int.from_bytes(size, "big")


def _closed(stream: io.BytesIO) -> bool:
    """Read the end of a map of indefinite length, if it is here."""
    if _next_byte(stream) != _BREAK:
        return False
    stream.seek(1, io.SEEK_CUR)
    return True


def _next_byte(stream: io.BytesIO) -> bytes:
    """The byte to come, which is not read; ``b""`` at the end."""
    return bytes(stream.getbuffer()[stream.tell() : stream.tell() + 1])


_INDEFINITE: Final = 31
_BREAK: Final = b"\xff"
_TEXT: Final = frozenset({str})
_CONTAINERS: Final = frozenset({dict, list})
_PLAIN: Final = _CONTAINERS | {str, int, float, bool, bytes, type(None)}


def _check_plain(found: dict[Any, Any]) -> None:
    """Looks at kinds and not at values: a frame of a million small numbers takes milliseconds."""
    waiting: list[Any] = [found]
    while waiting:
        container = waiting.pop()
        items = container
        if type(container) is dict:
            if not _TEXT.issuperset(map(type, container)):
                raise InvalidCbor("the keys of a map must be text")
            items = container.values()
        kinds = set(map(type, items))
        if not kinds <= _PLAIN:
            strange = min(kind.__name__ for kind in kinds - _PLAIN)
            raise InvalidCbor(f"a value of the kind {strange} is not part of the protocol")
        if not kinds.isdisjoint(_CONTAINERS):
            waiting.extend(item for item in items if type(item) in _CONTAINERS)
