"""Answers a file of rows for a program on this machine, into files that it names, without HTTP and without a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from uma_trio.client import open_client
from uma_trio.config import Config
from uma_trio.gateway.batches.results import RowFile
from uma_trio.gateway.batches.row_caller import RowCaller
from uma_trio.gateway.batches.run import Run
from uma_trio.gateway.batches.service import reader_of
from uma_trio.gateway.endpoint import Endpoint
from uma_trio.processes.large_work import LargeWork


async def answer_file(
    file: Path,
    output: Path,
    errors: Path,
    *,
    config: Config,
    endpoints: Sequence[Endpoint],
    at_a_time: int | None,
    progress: Callable[[int, int, int], None],
) -> int:
    """Answer the rows that have no answer and no error yet; returns how many have errors.

    Args:
        output, errors: where lines are appended.
        endpoints: those that rows may name.
        at_a_time: rows that are answered at a time; ``None`` is as many as the daemon's first model answers together.
        progress: called with the numbers of rows, of answers and of errors, at first and when they change.

    Raises:
        RowsError: a line of the file is no row.
        Busy: another process appends to one of the files.
        OSError: a file cannot be read or written.
        ClientError: there is no daemon at first.
    """
    reader = reader_of(config, endpoints)
    async with open_client(config.listen.socket, wait_s=None) as client:
        at_a_time = at_a_time or (await client.models())[0].parallel
    contents = await anyio.to_thread.run_sync(reader.check, file)
    caller = RowCaller.of(endpoints, config, LargeWork(anyio.Lock(), anyio.sleep))
    with RowFile(output) as answers, RowFile(errors) as refusals:

        async def write() -> None:
            progress(contents.rows, len(answers.custom_ids), len(refusals.custom_ids))

        rows = (row for _, row in reader.read(file))
        await write()
        await Run(rows, answers, refusals, caller.answer, anyio.CapacityLimiter(at_a_time), at_a_time, write).run()
        if not refusals.n_bytes:
            os.unlink(errors)
        return len(refusals.custom_ids)
