"""Perf log records as bytes, and back: a CBOR sequence (RFC 8742) of ``[name, {key: value}]``.

A header opens each run: a file may hold several, one after another.  It begins with the tag that says "this
is CBOR" (RFC 8949, 3.4.6), whose bytes no UTF-8 text contains; so the reader finds the next run also behind
a record that was cut off when a daemon was killed.

Source: docs/PERF_LOG.md.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import attrs
import cbor2

from uma_trio.telemetry.perf_records import (
    VERSION,
    Header,
    Kind,
    Record,
    RequestRecord,
    TickRecord,
    Trailer,
)

SELF_DESCRIBED: Final = b"\xd9\xd9\xf7"
MAGIC: Final = SELF_DESCRIBED + b"\x82" + cbor2.dumps(Header.NAME)
"""How every header begins: the tag, an array of two, the name."""

MAX_DEPTH: Final = 8
"""Of containers in a record; ours have three."""


class NotAPerfLog(ValueError):
    """The bytes are something else, or of a version that is not known here; says what."""


class Damaged(ValueError):
    """A record is not what it should be."""


@attrs.define(kw_only=True)
class Run:
    """What one daemon wrote, from its header on."""

    header: Header
    ticks: list[TickRecord] = attrs.field(factory=list)
    """Their moments count from the run's beginning, as those of ``requests``."""
    requests: list[RequestRecord] = attrs.field(factory=list)
    """In the order of their ends."""
    trailer: Trailer | None = None
    """``None``: the daemon still runs, or was killed."""
    cut: str | None = None
    """Why the rest of the run could not be read, if so."""


# -- kinds: how a value stands in the file -----------------------------------------------------------


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise Damaged("a whole number was expected")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Damaged("a number was expected")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Damaged("text was expected")
    return value


def _settings(value: Any) -> Mapping[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise Damaged("a map with text keys was expected")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise Damaged("a list was expected")
    return value


def _pair(value: Any) -> tuple[int, int]:
    if len(_list(value)) != 2:
        raise Damaged("a pair was expected")
    return _whole(value[0]), _whole(value[1])


def _scaled(scale: float) -> tuple[Callable[[float], int | None], Callable[[Any], float]]:
    def write(value: float) -> int | None:
        return round(scale * value) if math.isfinite(value) else None

    return write, lambda value: _whole(value) / scale


def _as_it_is(value: Any) -> Any:
    return value


_hundredths, _from_hundredths = _scaled(1e2)

KINDS: Final[Mapping[Kind, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    Kind.COUNT: (int, _whole),
    Kind.TEXT: (_as_it_is, _text),
    Kind.NUMBER: (float, _number),
    Kind.SETTINGS: (dict, _settings),
    Kind.MOMENT: _scaled(1e6),
    Kind.DURATION: _scaled(1e3),
    Kind.SHARE: _scaled(1e4),
    Kind.ROUNDED: _scaled(1),
    Kind.COUNTS: (
        lambda value: [int(n) for n in value],
        lambda value: tuple([_whole(n) for n in _list(value)]),
    ),
    Kind.PAIRS: (
        lambda value: [[int(a), int(b)] for a, b in value],
        lambda value: tuple([_pair(each) for each in _list(value)]),
    ),
    Kind.DURATIONS: (
        lambda value: [_hundredths(each) or 0 for each in value],
        lambda value: [_from_hundredths(each) for each in _list(value)],
    ),
}
"""Of each kind: value to what stands in the file (``None``: nothing), and back."""


@attrs.frozen
class _Column:
    """One field of a record."""

    name: str
    key: str
    moment: bool
    default: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _columns(cls: type) -> tuple[_Column, ...]:
    return tuple(
        _Column(
            field.name,
            field.metadata["key"],
            field.metadata["kind"] is Kind.MOMENT,
            field.default,
            *KINDS[field.metadata["kind"]],
        )
        for field in attrs.fields(cls)
    )


COLUMNS: Final[Mapping[type, tuple[_Column, ...]]] = {
    cls: _columns(cls) for cls in (Header, TickRecord, RequestRecord, Trailer)
}
BY_KEY: Final[Mapping[type, Mapping[str, _Column]]] = {
    cls: {column.key: column for column in columns} for cls, columns in COLUMNS.items()
}
RECORDS: Final[Mapping[str, type[Record]]] = {cls.NAME: cls for cls in (TickRecord, RequestRecord, Trailer)}


# -- records to bytes --------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """The beginning of a run."""
    fields = _written(header, 0.0)
    return MAGIC + cbor2.dumps({"version": fields.pop("version", VERSION), **fields})


def encode(record: Record, origin_s: float) -> bytes:
    """``record`` of a run whose header has ``clock_s = origin_s``."""
    return cbor2.dumps([record.NAME, _written(record, origin_s)])


def _written(record: Header | Record, origin_s: float) -> dict[str, Any]:
    fields = {}
    for column in COLUMNS[type(record)]:
        value = getattr(record, column.name)
        if value is None or value == column.default:
            continue
        written = column.write(value - origin_s if column.moment else value)
        if written is not None:
            fields[column.key] = written
    return fields


# -- bytes to records --------------------------------------------------------------------------------


def decode(data: bytes) -> list[Run]:
    """All runs in ``data``, in order, as far as they can be read.

    A header that is equal to the one before it continues that run: so are a log's parts joined that were
    written one after the other.

    Raises:
        NotAPerfLog: it is empty, something else, of a newer version, or ends within its first header.
    """
    if not data:
        raise NotAPerfLog("the file is empty")
    if not data.startswith(MAGIC):
        cut_off = MAGIC.startswith(data)
        raise NotAPerfLog(
            "it ends within its first header" if cut_off else "it does not begin with a perf log's header"
        )
    runs: list[Run] = []
    start = 0
    while start >= 0:
        following = data.find(MAGIC, start + len(MAGIC))
        _decode_run(data[start : following if following >= 0 else len(data)], start, runs)
        start = following
    if not runs:
        raise NotAPerfLog("it ends within its first header")
    return runs


def _decode_run(data: bytes, offset: int, runs: list[Run]) -> None:
    """Add the run in ``data``, which stands at ``offset`` of the file, to ``runs``."""
    stream = io.BytesIO(data)
    stream.seek(len(SELF_DESCRIBED))
    decoder = cbor2.CBORDecoder(stream, max_depth=MAX_DEPTH)
    run: Run | None = None
    good = 0
    try:
        while True:
            item = decoder.decode()
            if run is None:
                run = _opened(_named(item)[1], runs)
            else:
                _take(run, *_named(item))
            good = stream.tell()
    except cbor2.CBORDecodeEOF:
        if run is not None and good < len(data):
            run.cut = f"its last record is cut off after {len(data) - good} bytes"
    except (cbor2.CBORDecodeError, Damaged, RecursionError, OverflowError, MemoryError) as error:
        if run is None:
            raise NotAPerfLog(f"the header at byte {offset} is damaged: {error}") from None
        run.cut = f"the record at byte {offset + good} is damaged ({error}), and what follows it was not read"


def _named(item: Any) -> tuple[str, dict[str, Any]]:
    if not (type(item) is list and len(item) == 2 and type(item[0]) is str and type(item[1]) is dict):
        raise Damaged("a name and a map were expected")
    return item[0], item[1]


def _opened(fields: dict[str, Any], runs: list[Run]) -> Run:
    """The run that a header opens or continues."""
    version = fields.get("version")
    if version != VERSION:
        raise NotAPerfLog(f"its format has version {version!r}, and this uma-trio reads version {VERSION}")
    header = _record(Header, fields)
    if not (runs and runs[-1].header == header):
        runs.append(Run(header=header))
    return runs[-1]


def _take(run: Run, name: str, fields: dict[str, Any]) -> None:
    cls = RECORDS.get(name)
    if cls is None:
        return  # of a newer version
    record = _record(cls, fields)
    if isinstance(record, TickRecord):
        run.ticks.append(record)
    elif isinstance(record, RequestRecord):
        run.requests.append(record)
    else:
        run.trailer = record


R = TypeVar("R", bound=Header | Record)


def _record(cls: type[R], fields: dict[str, Any]) -> R:
    by_key = BY_KEY[cls]
    try:
        return cls(**{by_key[key].name: by_key[key].read(value) for key, value in fields.items() if key in by_key})
    except TypeError:
        missing = [
            column.key for column in COLUMNS[cls] if column.default is attrs.NOTHING and column.key not in fields
        ]
        raise Damaged(f"{cls.NAME} without {', '.join(missing)}") from None
