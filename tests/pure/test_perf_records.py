"""The perf log's bytes: what is written is read, cut off anywhere, damaged anywhere, and by older readers."""

import re
from pathlib import Path
from typing import Any

import attrs
import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

import uma_trio
from tests.support.perf_runs import HEADER, as_bytes, simulated
from uma_trio.telemetry import perf_format
from uma_trio.telemetry.perf_format import MAGIC, NotAPerfLog, Run, decode, encode, encode_header
from uma_trio.telemetry.perf_records import Header, Kind, RequestRecord, TickRecord, Trailer

PAGE = Path(uma_trio.__file__).parents[1] / "docs" / "PERF_LOG.md"
CLASSES: list[Any] = [Header, TickRecord, RequestRecord, Trailer]

VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.COUNT: st.integers(0, 1 << 50),
    Kind.TEXT: st.text(max_size=40),
    Kind.NUMBER: st.floats(0, 1e9),
    Kind.SETTINGS: st.dictionaries(
        st.text(max_size=9), st.none() | st.booleans() | st.integers(0, 99) | st.floats(0, 9)
    ),
    Kind.MOMENT: st.integers(0, 1 << 45).map(lambda us: us / 1e6),
    Kind.DURATION: st.integers(0, 1 << 40).map(lambda us: us / 1e3),
    Kind.SHARE: st.integers(0, 10_000).map(lambda n: n / 1e4),
    Kind.ROUNDED: st.integers(0, 1 << 30).map(float),
    Kind.COUNTS: st.lists(st.integers(0, 300), max_size=9).map(tuple),
    Kind.PAIRS: st.lists(st.tuples(st.integers(0, 300), st.integers(1, 8192)), max_size=5).map(tuple),
    Kind.DURATIONS: st.lists(st.integers(0, 1 << 30).map(lambda n: n / 1e2), max_size=9),
}
"""What the file keeps exactly."""


def records_of(cls: Any) -> st.SearchStrategy[Any]:
    def value(field: Any) -> st.SearchStrategy[Any]:
        found = VALUES[field.metadata["kind"]]
        return found if field.default is attrs.NOTHING else found | st.just(attrs.fields_dict(cls)[field.name].default)

    fields = {field.name: value(field) for field in attrs.fields(cls) if field.name not in ("version", "scheduling")}
    if cls is Header:
        fields["scheduling"] = VALUES[Kind.SETTINGS]
    return st.builds(cls, **fields)


def normal(record: Any) -> Any:
    """Lists and tuples alike."""
    if isinstance(record, RequestRecord):
        return attrs.evolve(record, itl_ms=list(record.itl_ms))
    return attrs.evolve(record, seq_ids=tuple(record.seq_ids)) if isinstance(record, TickRecord) else record


def read_back(*records: Any, header: Header = HEADER) -> Run:
    [run] = decode(encode_header(header) + b"".join(encode(record, 0.0) for record in records))
    assert run.cut is None
    return run


# -- there and back -----------------------------------------------------------------------------------


@given(records_of(Header))
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    assert decode(encode_header(header)) == [Run(header=header)]


@given(
    st.lists(records_of(TickRecord), max_size=5), st.lists(records_of(RequestRecord), max_size=5), records_of(Trailer)
)
def test_records_are_read_as_they_were_written(ticks: list[Any], requests: list[Any], trailer: Trailer) -> None:
    run = read_back(*ticks, *requests, trailer)
    assert list(map(normal, run.ticks)) == list(map(normal, ticks))
    assert list(map(normal, run.requests)) == list(map(normal, requests))
    assert run.trailer == trailer


def test_moments_count_from_the_beginning_of_the_run() -> None:
    header = attrs.evolve(HEADER, clock_s=5000.0)
    tick = TickRecord(t_s=5001.25)
    request = RequestRecord(id="r", arrived_s=5002.0, first_token_s=5003.5, ended_s=5004.0, reason="stop")
    [run] = decode(encode_header(header) + encode(tick, 5000.0) + encode(request, 5000.0))
    assert run.ticks == [TickRecord(t_s=1.25)]
    assert (run.requests[0].arrived_s, run.requests[0].first_token_s, run.requests[0].ended_s) == (2.0, 3.5, 4.0)
    assert run.requests[0].ttft_ms == 1500.0
    assert run.requests[0].admitted_s is None


def test_fractions_are_rounded() -> None:
    tick = TickRecord(t_s=1.0000004, decode_ms=2.00049, bandwidth_share=0.12344, prompt_context=7.4)
    [found] = read_back(tick).ticks
    assert (found.t_s, found.decode_ms, found.bandwidth_share, found.prompt_context) == (1.0, 2.0, 0.1234, 7.0)
    request = RequestRecord(id="r", arrived_s=0.0, ended_s=1.0, reason="stop", itl_ms=[20.0049, 7.126])
    assert read_back(request).requests[0].itl_ms == [20.0, 7.13]


def test_what_is_no_number_is_left_out() -> None:
    tick = TickRecord(t_s=1.0, predicted_ms=float("inf"), decode_ms=float("nan"), host_gap_ms=1e300)
    [found] = read_back(tick).ticks
    assert (found.predicted_ms, found.decode_ms) == (None, 0.0)


def test_sizes() -> None:
    plain = TickRecord(
        t_s=3600.0,
        seq_ids=(0, 1, 2, 3),
        tokens=4,
        context_tokens=4000,
        predicted_ms=20.1,
        decode_ms=21.2,
        sample_ms=0.25,
        host_gap_ms=0.2,
    )
    assert len(encode(plain, 0.0)) < 70
    mixed = attrs.evolve(
        plain, prompts=((5, 64),), prompt_context=128.0, waiting=2, bytes_moved=1 << 31, bandwidth_share=0.7
    )
    assert len(encode(mixed, 0.0)) < 100


# -- readers and writers of other versions ------------------------------------------------------------


def test_unknown_fields_and_records_are_skipped() -> None:
    fields = {"t": 1_000_000, "seq": [1], "colour": "blue", "more": {"a": [1, 2, {"b": None}]}}
    data = encode_header(HEADER) + cbor2.dumps(["tick", fields]) + cbor2.dumps(["mood", {"good": True}])
    data += encode(TickRecord(t_s=2.0), 0.0)
    [run] = decode(data)
    assert run.ticks == [TickRecord(t_s=1.0, seq_ids=(1,)), TickRecord(t_s=2.0)]
    assert run.cut is None


def test_a_field_more_in_the_header() -> None:
    fields = cbor2.loads(encode_header(HEADER)[3:])[1] | {"weather": "fine"}
    assert decode(MAGIC + cbor2.dumps(fields)) == [Run(header=HEADER)]


def test_a_newer_format_says_so() -> None:
    with pytest.raises(NotAPerfLog, match="version 2, and this uma-trio reads version 1"):
        decode(encode_header(attrs.evolve(HEADER, version=2)))


# -- files that are not whole -------------------------------------------------------------------------


def small_log() -> tuple[bytes, list[int]]:
    """Some records, and where each of them ends."""
    run = simulated(requests=2)
    parts = [
        encode_header(HEADER),
        *[encode(tick, 0.0) for tick in run.ticks[:6]],
        encode(run.requests[0], 0.0),
        encode(Trailer(), 0.0),
    ]
    ends = [len(b"".join(parts[: n + 1])) for n in range(len(parts))]
    return b"".join(parts), ends


def test_cut_off_at_every_byte() -> None:
    data, ends = small_log()
    [whole] = decode(data)
    for length in range(len(data)):
        if length < ends[0]:
            with pytest.raises(NotAPerfLog, match="empty" if length == 0 else "ends within its first header"):
                decode(data[:length])
            continue
        [run] = decode(data[:length])
        n_whole = sum(end <= length for end in ends) - 1
        assert len(run.ticks) + len(run.requests) == n_whole
        assert run.ticks == whole.ticks[:n_whole]
        assert run.trailer is None
        left = length - max(end for end in ends if end <= length)
        assert run.cut == (f"its last record is cut off after {left} bytes" if left else None)


def test_a_run_behind_one_that_was_cut_off_at_any_byte() -> None:
    data, ends = small_log()
    second = attrs.evolve(HEADER, started="later")
    after = encode_header(second) + encode(TickRecord(t_s=9.0), 0.0)
    for length in range(ends[0], len(data)):
        first, other = decode(data[:length] + after)
        assert (first.cut is None) == (length in ends)
        assert other == Run(header=second, ticks=[TickRecord(t_s=9.0)])


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_byte_costs_no_more_than_what_follows_it(at: int, byte: int) -> None:
    data, ends = small_log()
    at %= len(data)
    damaged = data[:at] + bytes([byte]) + data[at + 1 :]
    [whole] = decode(data)
    try:
        runs = decode(damaged)
    except NotAPerfLog:
        assert at < ends[0]
        return
    n_before = sum(end <= at for end in ends) - 1
    found = [record for run in runs for record in (*run.ticks, *run.requests)]
    if at >= ends[0]:
        assert found[:n_before] == [*whole.ticks, *whole.requests][:n_before]


@given(st.binary(max_size=200))
def test_any_bytes_behind_a_header(data: bytes) -> None:
    runs = decode(encode_header(HEADER) + data)
    assert runs[0].header == HEADER


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"t": "soon"}, "a whole number"),
        ({"t": 1, "seq": 4}, "a list"),
        ({"t": 1, "seq": [True]}, "a whole number"),
        ({"t": 1, "pre": [[1]]}, "a pair"),
        ({"t": 1, "dec": 2.5}, "a whole number"),
        ({"seq": [1]}, "tick without t"),
    ],
)
def test_a_record_that_is_none_is_told_with_its_place(fields: dict[str, Any], said: str) -> None:
    header = encode_header(HEADER)
    [run] = decode(
        header + encode(TickRecord(t_s=1.0), 0.0) + cbor2.dumps(["tick", fields]) + encode(TickRecord(t_s=2.0), 0.0)
    )
    assert run.ticks == [TickRecord(t_s=1.0)]
    assert run.cut is not None
    assert said in run.cut
    assert f"byte {len(header) + len(encode(TickRecord(t_s=1.0), 0.0))}" in run.cut


@pytest.mark.parametrize("data", [b"GGUF" + bytes(100), b"{}", cbor2.dumps(["tick", {}]), b"\xd9\xd9\xf7\x80", b"\x00"])
def test_something_else(data: bytes) -> None:
    with pytest.raises(NotAPerfLog, match="does not begin with"):
        decode(data)


def test_a_huge_length_takes_no_memory() -> None:
    data = encode_header(HEADER) + b"\x82\x64tick\xa1\x61t\x5b" + (1 << 60).to_bytes(8, "big") + b"abc"
    [run] = decode(data)
    assert run.cut is not None


def test_an_id_cannot_pass_for_a_header() -> None:
    for name in ("uma-trio perf log", MAGIC.decode("latin-1"), MAGIC.decode("utf-8", "replace"), "Ùù÷\x82q"):
        request = RequestRecord(id=name, arrived_s=0.0, ended_s=1.0, reason="stop")
        assert [found.id for found in read_back(request, request).requests] == [name, name]


# -- several runs, several parts ----------------------------------------------------------------------


def test_runs_one_after_another() -> None:
    runs = [
        attrs.evolve(simulated(seed, requests=3), header=attrs.evolve(HEADER, started=str(seed))) for seed in range(3)
    ]
    found = decode(b"".join(map(as_bytes, runs)))
    assert [run.header.started for run in found] == ["0", "1", "2"]
    assert [len(run.ticks) for run in found] == [len(run.ticks) for run in runs]


def test_a_header_again_continues_its_run() -> None:
    parts = [encode_header(HEADER) + encode(TickRecord(t_s=float(n)), 0.0) for n in range(3)]
    [run] = decode(b"".join(parts) + encode(Trailer(dropped=2), 0.0))
    assert [tick.t_s for tick in run.ticks] == [0.0, 1.0, 2.0]
    assert run.trailer == Trailer(dropped=2)


# -- docs/PERF_LOG.md ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_documented_with_its_kind_and_default(cls: Any) -> None:
    [section] = re.findall(rf"^### {re.escape(cls.NAME)}\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]
    assert [row[0].strip("`") for row in rows] == [field.metadata["key"] for field in attrs.fields(cls)]
    for row, field in zip(rows, attrs.fields(cls), strict=True):
        assert row[1] == field.metadata["kind"].name.lower(), field.name
        assert row[3].endswith("."), field.name
        if field.default is attrs.NOTHING:
            expected = ""
        elif field.default is None:
            expected = "*none*"
        elif field.default in ((), "") or isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
            expected = "*empty*"
        else:
            expected = f"`{field.default}`"
        assert row[2] == expected, field.name


def test_keys_are_unique_and_kinds_are_documented() -> None:
    for cls in CLASSES:
        keys = [field.metadata["key"] for field in attrs.fields(cls)]
        assert len(set(keys)) == len(keys)
    for kind in Kind:
        assert kind in perf_format.KINDS
        assert re.search(rf"^\| .*\b{kind.name.lower()}\b", PAGE.read_text(), re.MULTILINE)


def test_the_documented_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [source] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    data, ends = small_log()
    (tmp_path / "perf.cborseq").write_bytes(data[:-1])
    monkeypatch.chdir(tmp_path)
    exec(source, {})
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(ends) - 1
    assert shown[1].startswith("tick {'t':")


def test_the_magic_bytes_are_the_documented_ones() -> None:
    text = PAGE.read_text()
    assert MAGIC[:5].hex(" ") in text
    assert MAGIC[5:].decode() in text
