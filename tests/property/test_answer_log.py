"""Logs of detached answers: any beginning of a file is an earlier state, and damage is found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.daemon.store import answer_log as form
from uma_trio.daemon.store.answer_log import (
    AnswerLog,
    Attempt,
    Begin,
    Change,
    End,
    Pause,
    Prompt,
    Record,
    Renamed,
    decode,
    encode,
    new_tokens,
)
from uma_trio.daemon.store.encoding import MAX_TOKEN_ID, DamagedFile, encode_tokens
from uma_trio.principal import Principal
from uma_trio.protocol.requests import parse_generate

IDS = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=6)
EVENTS = st.lists(st.binary(max_size=12), max_size=3)
ATTEMPTS = st.sampled_from([Attempt(), Attempt(alone=True), Pause()])
NEW = st.one_of(
    st.builds(new_tokens, IDS, EVENTS, st.none() | st.floats(0, 20)),
    ATTEMPTS,
    st.builds(Renamed, st.text(max_size=3)),
)
REQUESTS = st.sampled_from(
    [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "é"}], "logit_bias": {"3": 1.5}, "stop": ["x"]},
        {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "f"}], "tool_choice": {"name": "f"}},
        {"prompt": [1, 2], "constraint": {"regex": "a+"}, "metadata": {"a": [1, None, {"b": True}]}},
    ]
)


@st.composite
def answers(draw: Any) -> list[Record]:
    """The records of an answer, which has perhaps not ended."""
    request = parse_generate(
        {"id": draw(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)), **draw(REQUESTS)}
    )
    records: list[Record] = [
        Begin(principal=Principal("uid:0", 2.0, draw(st.none() | st.just(3))), request=request, created_at=1.5),
        *draw(st.lists(ATTEMPTS, max_size=2)),
    ]
    if draw(st.booleans()):
        tokens = encode_tokens(draw(IDS))
        records.append(Prompt(tokens=tokens, text="?", dropped=1, model="m", turns=2))
        records += draw(st.lists(NEW, max_size=6))
    if draw(st.booleans()):
        records.append(End(events=draw(EVENTS), state="completed", ended_at=2.5))
    return records


def whole(records: list[Record]) -> AnswerLog:
    first, *others = records
    assert isinstance(first, Begin)
    log = AnswerLog(first)
    for each in others:
        log.add(each)
    return log


def facts(log: AnswerLog) -> tuple[object, ...]:
    return (
        log.begin,
        log.prompt,
        bytes(log.tokens),
        log.mu,
        log.events,
        log.n_attempts,
        log.is_alone,
        log.title,
        log.end,
    )


@given(answers(), st.data())
def test_any_beginning_of_a_file_is_an_earlier_state_of_the_answer(records: list[Record], data: Any) -> None:
    parts = [encode(each) for each in records]
    file = b"".join(parts)
    cut = data.draw(st.integers(0, len(file)))
    complete, n_bytes = 0, 0
    while complete < len(parts) and n_bytes + len(parts[complete]) <= cut:
        n_bytes += len(parts[complete])
        complete += 1
    if not complete:
        with pytest.raises(DamagedFile):
            decode(file[:cut])
        return
    log, end = decode(file[:cut])
    assert (end, facts(log)) == (n_bytes, facts(whole(records[:complete])))
    all_events, all_tokens = whole(records).events, bytes(whole(records).tokens)
    assert log.events == all_events[: len(log.events)]
    assert bytes(log.tokens) == all_tokens[: len(log.tokens)]


@given(answers(), st.data())
def test_a_changed_byte_is_never_read_as_something_else(records: list[Record], data: Any) -> None:
    file = bytearray(b"".join(map(encode, records)))
    at = data.draw(st.integers(0, len(file) - 1))
    file[at] ^= data.draw(st.integers(1, 255))
    try:
        log, _ = decode(file)
    except DamagedFile:
        return
    earlier = [facts(whole(records[:n])) for n in range(1, len(records) + 1)]
    assert facts(log) in earlier


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([Attempt()], "begin with a request"),
        ([End(events=[], state="failed", ended_at=1.0)], "begin with a request"),
        (["begin", new_tokens([1], [], None)], "without a prompt"),
        (["begin", "prompt", new_tokens([1], [], None, [Change(after_tokens=2)])], "change of other tokens"),
        (["begin", "prompt", "prompt"], "two prompts"),
        (["begin", "end", Pause()], "after its end"),
        (["begin", "begin"], "after its end"),
        (["begin", End(events=[], state="failed", ended_at=float("nan"))], "not a number"),
        (["begin", form.Prompt(tokens=b"abc", text="", dropped=0, model="", turns=0)], "half a token"),
    ],
)
def test_records_that_cannot_follow_each_other_are_refused(records: list[Any], problem: str) -> None:
    request = parse_generate({"id": "a", "prompt": "x"})
    known = {
        "begin": Begin(principal=Principal("uid:0"), request=request, created_at=1.0),
        "prompt": Prompt(tokens=b"", text="", dropped=0, model="", turns=0),
        "end": End(events=[], state="completed", ended_at=1.0),
    }
    with pytest.raises(DamagedFile, match=problem):
        decode(b"".join(encode(known[each] if isinstance(each, str) else each) for each in records))


def test_an_unknown_record_is_refused() -> None:
    data = form.record(form.MARK, msgspec.msgpack.encode({"type": "later"}))
    with pytest.raises(DamagedFile, match="invalid record"):
        decode(data)
