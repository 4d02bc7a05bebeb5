"""Records of the perf log: round trips, torn and damaged lines, and the tables in docs/PERF_LOG.md."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import uma_trio
from tests.support.cases import all_cases
from tests.support.perf_runs import HEADER, encode_run, simulated
from uma_trio.telemetry.perf_records import (
    VERSION,
    Header,
    NotAPerfLog,
    RequestRecord,
    Run,
    TickRecord,
    Trailer,
    decode,
    encode,
)

PAGE = Path(uma_trio.__file__).parents[1] / "docs" / "PERF_LOG.md"
CLASSES: list[Any] = [Header, TickRecord, RequestRecord, Trailer]

counts = st.integers(0, 1 << 50)
milliseconds = st.integers(0, 1 << 40).map(lambda us: us / 1e3)
seconds = st.integers(0, 1 << 45).map(lambda us: us / 1e6)
texts = st.text(max_size=40)

ticks = st.builds(
    TickRecord,
    start_s=seconds,
    decode_seq_ids=st.lists(st.integers(0, 300), max_size=9),
    prefill_chunks=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 8192)), max_size=5),
    tokens=counts,
    context_tokens=counts,
    decode_calls=counts,
    predicted_ms=st.none() | milliseconds,
    decode_ms=milliseconds,
    host_gap_ms=st.none() | milliseconds,
)
requests = st.builds(
    RequestRecord,
    id=texts,
    principal=texts,
    arrived_s=seconds,
    admitted_s=st.none() | seconds,
    finished_s=seconds,
    finish_reason=texts,
    inter_token_ms=st.lists(st.integers(0, 1 << 30).map(lambda n: n / 1e2), max_size=9),
)
headers = st.builds(
    Header,
    uma_trio=texts,
    llama_cpp=st.none() | texts,
    started=texts,
    clock_s=st.floats(0, 1e9),
    model=texts,
    n_ctx=counts,
    n_seq_max=counts,
    n_batch=counts,
    scheduling=st.dictionaries(texts, st.none() | st.booleans() | st.integers(0, 99) | st.floats(0, 9)),
)


def normal(record: Any) -> Any:
    """Lists and tuples alike, as JSON has them."""
    return json.loads(encode(record))


def read_back(*records: Any) -> Run:
    [run] = decode(encode(HEADER) + b"".join(map(encode, records)))
    assert run.unreadable_lines == 0
    return run


# -- round trips --------------------------------------------------------------------------------------


@given(headers)
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    assert decode(encode(header)) == [Run(header=header)]


@given(st.lists(ticks, max_size=5), st.lists(requests, max_size=5), counts)
def test_records_are_read_as_they_were_written(some: list[Any], others: list[Any], dropped: int) -> None:
    trailer = Trailer(dropped_records=dropped)
    run = read_back(*some, *others, trailer)
    assert [*map(normal, run.ticks)] == [*map(normal, some)]
    assert [*map(normal, run.requests)] == [*map(normal, others)]
    assert run.trailer == trailer


def test_times_count_from_the_start_of_the_run() -> None:
    tick = TickRecord(start_s=5001.25)
    request = RequestRecord(id="r", arrived_s=5002.0, first_token_s=5003.5, finished_s=5004.0, finish_reason="stop")
    [run] = decode(encode(replace(HEADER, clock_s=5000.0)) + encode(tick, 5000.0) + encode(request, 5000.0))
    assert run.ticks == [TickRecord(start_s=1.25)]
    found = run.requests[0]
    assert (found.arrived_s, found.first_token_s, found.finished_s) == (2.0, 3.5, 4.0)
    assert found.ttft_ms == 1500.0
    assert found.admitted_s is None


def test_fractions_are_rounded() -> None:
    tick = TickRecord(start_s=1.0000004, decode_ms=2.00049, memory_bandwidth_share=0.12344)
    [found] = read_back(tick).ticks
    assert (found.start_s, found.decode_ms, found.memory_bandwidth_share) == (1.0, 2.0, 0.123)
    request = RequestRecord(
        id="r", arrived_s=0.0, finished_s=1.0, finish_reason="stop", inter_token_ms=[20.0049, 7.126]
    )
    assert read_back(request).requests[0].inter_token_ms == [20.0, 7.13]


def test_infinity_is_not_measured() -> None:
    [found] = read_back(TickRecord(start_s=1.0, predicted_ms=float("inf"), host_gap_ms=float("nan"))).ticks
    assert (found.predicted_ms, found.host_gap_ms) == (None, None)


def test_sizes() -> None:
    tick = TickRecord(
        start_s=3600.0,
        decode_seq_ids=(0, 1, 2, 3),
        tokens=4,
        context_tokens=4000,
        predicted_ms=20.1,
        decode_ms=21.2,
        sample_ms=0.25,
        host_gap_ms=0.2,
    )
    assert len(encode(tick)) < 200
    data = encode_run(simulated())
    assert len(gzip.compress(data, 1)) < len(data) / 3


# -- other versions, torn and damaged lines -----------------------------------------------------------


def test_unknown_fields_are_ignored() -> None:
    line = b'{"kind":"tick","start_s":1.0,"decode_seq_ids":[1],"colour":{"a":[1,null]}}\n'
    [run] = decode(encode(HEADER) + line + encode(TickRecord(start_s=2.0)))
    assert run.ticks == [TickRecord(start_s=1.0, decode_seq_ids=[1]), TickRecord(start_s=2.0)]
    assert run.unreadable_lines == 0
    header = encode(HEADER).replace(b'"n_ctx"', b'"weather":"fine","n_ctx"')
    assert decode(header) == [Run(header=HEADER)]


def test_another_version_is_an_error() -> None:
    with pytest.raises(NotAPerfLog, match=rf"version 9; this uma-trio reads version {VERSION}"):
        decode(encode(replace(HEADER, version=9)))


def small_log() -> list[bytes]:
    run = simulated(requests=2)
    return [encode(HEADER), *map(encode, run.ticks[:6]), encode(run.requests[0]), encode(Trailer())]


def test_a_torn_last_line_is_ignored_wherever_it_is_torn() -> None:
    lines = small_log()
    data = b"".join(lines)
    [whole] = decode(data)
    for length in range(len(data)):
        n_whole = data[:length].count(b"\n") - 1
        if n_whole < 0:
            with pytest.raises(NotAPerfLog, match=r"empty|does not begin|first header is incomplete"):
                decode(data[:length])
            continue
        [run] = decode(data[:length])
        assert len(run.ticks) + len(run.requests) == n_whole
        assert run.ticks == whole.ticks[:n_whole]
        assert (run.trailer, run.unreadable_lines) == (None, 0)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_byte_costs_at_most_two_lines(at: int, byte: int) -> None:
    lines = small_log()
    data = bytearray(b"".join(lines))
    at = len(lines[0]) + at % (len(data) - len(lines[0]))
    data[at] = byte
    [run] = decode(bytes(data))
    assert len(run.ticks) + len(run.requests) >= len(lines) - 2 - 2


@given(st.binary(max_size=200))
def test_any_bytes_after_a_header(data: bytes) -> None:
    assert decode(encode(HEADER) + data)[0].header == HEADER


@all_cases(
    "line",
    [b'{"kind":"tick"}', b'{"kind":"tick","start_s":"soon"}', b'{"kind":"mood"}', b"[1]", b"\xff", b'{"kind":"tick"'],
)
def test_damaged_lines_are_counted(line: bytes) -> None:
    [run] = decode(encode(HEADER) + line + b"\n\n" + encode(TickRecord(start_s=2.0)))
    assert run.ticks == [TickRecord(start_s=2.0)]
    assert run.unreadable_lines == 1


@all_cases("data", [b"GGUF" + bytes(100), b"{}\n", b'{"kind":"tick"}\n', b"\x00", b"\x1f\x8b", b"\n"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(NotAPerfLog, match=r"does not begin with|empty"):
        decode(data)


# -- several runs, several files ----------------------------------------------------------------------


def test_runs_one_after_another() -> None:
    runs = [attrs.evolve(simulated(seed, requests=3), header=replace(HEADER, started=str(seed))) for seed in range(3)]
    found = decode(b"".join(map(encode_run, runs)))
    assert [run.header.started for run in found] == ["0", "1", "2"]
    assert [len(run.ticks) for run in found] == [len(run.ticks) for run in runs]


def test_a_rotated_log_is_one_run() -> None:
    files = [encode(HEADER) + encode(TickRecord(start_s=float(n))) for n in range(3)]
    files[1] = gzip.compress(files[1])
    [run] = decode(*files, encode(Trailer(dropped_records=2)))
    assert [tick.start_s for tick in run.ticks] == [0.0, 1.0, 2.0]
    assert run.trailer == Trailer(dropped_records=2)


def test_a_gzip_file_is_read_up_to_where_it_is_torn() -> None:
    lines = small_log()
    data = b"".join(map(gzip.compress, lines))
    [whole] = decode(data)
    assert whole == decode(b"".join(lines))[0]
    for length in range(len(gzip.compress(lines[0])), len(data)):
        [run] = decode(data[:length])
        assert run.ticks == whole.ticks[: len(run.ticks)]
    assert len(run.ticks) == len(whole.ticks)


# -- docs/PERF_LOG.md ---------------------------------------------------------------------------------


@all_cases("cls", CLASSES)
def test_every_field_is_documented_with_its_default(cls: Any) -> None:
    kind = msgspec.inspect.type_info(cls).tag  # type: ignore[attr-defined]
    [section] = re.findall(rf"^### {kind}\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]
    fields = msgspec.structs.fields(cls)
    assert [row[0].strip("`") for row in rows] == [field.encode_name for field in fields]
    for row, field in zip(rows, fields, strict=True):
        assert row[2].endswith("."), field.name
        if field.required:
            assert row[1] == "", field.name
        else:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            assert row[1] == f"`{msgspec.json.encode(default).decode()}`", field.name


def test_the_documented_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [source] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = small_log()
    (tmp_path / "perf.jsonl").write_bytes(b"".join(lines)[:-1])
    monkeypatch.chdir(tmp_path)
    exec(source, {})
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(lines) - 1
    assert shown[1].startswith("tick {'start_s':")
