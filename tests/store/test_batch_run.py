"""The work on one file of rows: what is sent again, what is an error at last, and what a full disk leaves behind."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
import trio

from uma_trio.gateway.batches.results import RowFile
from uma_trio.gateway.batches.rows import Row, RowResult
from uma_trio.gateway.batches.run import MAX_TRIES, Later, Run

AT_A_TIME = 3
Answer = Callable[[Row], Awaitable[RowResult | Later]]


def rows(n: int) -> Iterator[Row]:
    for number in range(n):
        yield Row(custom_id=f"{number}", method="POST", url="/v1/completions", body=msgspec.Raw(b"{}"))


def result(row: Row, status: int = 200) -> RowResult:
    return RowResult(row.custom_id, status, msgspec.Raw(b"{}"), "req-1")


async def run(folder: Path, answer: Answer, n: int = 12) -> tuple[list[str], list[str]]:
    """Run all rows; returns those of both files."""
    n_written: list[int] = []
    with RowFile(folder / "output") as output, RowFile(folder / "errors") as errors:

        async def written() -> None:
            n_written.append(len(output.custom_ids) + len(errors.custom_ids))

        await Run(rows(n), output, errors, answer, anyio.CapacityLimiter(AT_A_TIME), AT_A_TIME, written).run()
    assert n_written[-1:] in ([n], [])
    found = [(folder / name).read_text().splitlines() for name in ("output", "errors")]
    answered, failed = ([json.loads(line)["custom_id"] for line in lines] for lines in found)
    return answered, failed


async def test_rows_are_answered_some_at_a_time_and_not_again(tmp_path: Path) -> None:
    running, most, all_run = Counter[str](), 0, trio.Event()

    async def answer(row: Row) -> RowResult:
        nonlocal most
        running["n"] += 1
        most = max(most, running["n"])
        if most == AT_A_TIME:
            all_run.set()
        await all_run.wait()
        await trio.sleep(0.001)
        running["n"] -= 1
        running["sent"] += 1
        return result(row, 400 if row.custom_id == "5" else 200)

    for _ in range(2):
        answered, failed = await run(tmp_path, answer)
        assert (sorted(answered, key=int), failed) == ([f"{n}" for n in range(12) if n != 5], ["5"])
        assert (running["sent"], most) == (12, AT_A_TIME)


async def test_what_is_refused_for_now_is_sent_again_as_late_as_it_should_be(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    sent = Counter[str]()
    began = trio.current_time()

    async def answer(row: Row) -> RowResult | Later:
        sent[row.custom_id] += 1
        if trio.current_time() - began < 100:
            return Later(30, result(row, 429), may_be_its_fault=False)
        return result(row)

    answered, failed = await run(tmp_path, answer)
    assert (len(answered), failed) == (12, [])
    assert max(sent.values()) <= 6, "not before the wait that the refusal asked for"


async def test_a_row_whose_answers_always_break_off_is_an_error_and_the_others_go_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    sent = Counter[str]()

    async def answer(row: Row) -> RowResult | Later:
        sent[row.custom_id] += 1
        if row.custom_id == "3":
            return Later(1, result(row, 502), may_be_its_fault=True)
        return result(row)

    answered, failed = await run(tmp_path, answer)
    assert (len(answered), failed) == (11, ["3"])
    assert sent == {f"{n}": MAX_TRIES if n == 3 else 1 for n in range(12)}


async def test_rows_that_cannot_be_written_are_computed_again_and_no_others(tmp_path: Path) -> None:
    sent = Counter[str]()
    real_write = os.write
    is_full = False

    async def answer(row: Row) -> RowResult:
        nonlocal is_full
        is_full = is_full or sent.total() == 7
        sent[row.custom_id] += 1
        return result(row)

    def write(descriptor: int, data: memoryview) -> int:
        if not is_full:
            return real_write(descriptor, data)
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data[: len(data) - 10])  # then there is no room for the rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.RaisesGroup(OSError, flatten_subgroups=True):
            await run(tmp_path, answer)
    whole = (tmp_path / "output").read_bytes().count(b"\n")
    assert 0 < whole < 12
    is_full = False
    n_before = sent.copy()
    answered, failed = await run(tmp_path, answer)
    assert (len(answered), len({*answered}), failed) == (12, 12, [])
    again = sent - n_before
    assert again.keys() == {*answered[whole:]}, "those that were written were not sent again"


async def test_rows_that_wait_to_be_written_when_that_fails_are_no_errors_of_their_own(tmp_path: Path) -> None:
    n_answered = 0

    async def answer(row: Row) -> RowResult:
        nonlocal n_answered
        n_answered += 1
        return result(row)

    async def written() -> None:
        while n_answered <= 2 * AT_A_TIME:  # one is written, some wait in the stream, and some for room in it
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        raise OSError(28, "No space left on device")

    with RowFile(tmp_path / "output") as output, RowFile(tmp_path / "errors") as errors:
        work = Run(rows(12), output, errors, answer, anyio.CapacityLimiter(AT_A_TIME), AT_A_TIME, written)
        with pytest.RaisesGroup(OSError, flatten_subgroups=True):
            await work.run()
