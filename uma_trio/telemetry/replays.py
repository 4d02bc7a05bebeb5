"""Compares an answer with its replay: equal, or where and why it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from uma_trio.protocol.queries import request_ids
from uma_trio.telemetry.perf_records import Header, Replay, RequestRecord, Run

NAMES: Final[Mapping[str, str]] = {
    "model": "another model file",
    "template": "another chat template",
    "environment": "another library, other devices, threads or layout of the KV cache",
}


@attrs.frozen(kw_only=True)
class Logged:
    """An answer in a log, with the run that gave it."""

    header: Header
    record: RequestRecord
    replay: Replay
    n_alike: int = 1
    """How many answers of the runs have this id, up to this one."""


@attrs.frozen(kw_only=True)
class Comparison:
    """What a replay has shown."""

    equal: bool
    n_tokens: int
    differs_at: int | None = None
    """The first token that differs; ``None``: none, or the log has hashes only."""
    was: int | None = None
    now: int | None = None
    """These tokens; ``None``: one of the two answers ends there."""
    causes: Sequence[str] = ()
    """What was not as it had been."""


def find(runs: Sequence[Run], request_id: str) -> Logged | None:
    """The last answer that the runs have for a replay, with this id of it or of its request."""
    logged, ids, n_alike = None, request_ids(request_id), 0
    for run in runs:
        for record in run.requests:
            if record.id in ids and record.replay is not None:
                n_alike += 1
                logged = Logged(header=run.header, record=record, replay=record.replay, n_alike=n_alike)
    return logged


def compare(logged: Logged, again: Logged) -> Comparison:
    """Compare an answer with its replay."""
    before, after = logged.replay.answer, again.replay.answer
    n, causes = logged.record.completion_tokens, _causes(logged, again)
    if logged.replay.answer_hash == again.replay.answer_hash:
        return Comparison(equal=True, n_tokens=n, causes=causes)
    if not before or not after:
        return Comparison(equal=False, n_tokens=n, causes=causes)
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    was, now = (tokens[at] if at < len(tokens) else None for tokens in (before, after))
    return Comparison(equal=False, n_tokens=n, differs_at=at, was=was, now=now, causes=causes)


def _causes(logged: Logged, again: Logged) -> list[str]:
    """What was not as it had been; what a batch of another shape changes, comes last."""
    was, now = logged.header, again.header
    causes = [text for name, text in NAMES.items() if was.identity.get(name) != now.identity.get(name)]
    if (was.llama_cpp, was.uma_trio) != (now.llama_cpp, now.uma_trio):
        causes.append(
            f"uma-trio {was.uma_trio} with llama.cpp {was.llama_cpp} was uma-trio {now.uma_trio} with {now.llama_cpp}"
        )
    if logged.replay.prompt_hash != again.replay.prompt_hash:
        causes.append("another prompt")
    if logged.replay.sampling != again.replay.sampling or logged.replay.rules_hash != again.replay.rules_hash:
        causes.append("other sampling parameters or limits")
    if again.replay.steps_shared:
        causes.append(f"the replay shared {again.replay.steps_shared} steps with other requests")
    if logged.replay.steps_shared:
        causes.append(
            f"{logged.replay.steps_shared} of its {logged.replay.steps_shared + logged.replay.steps_alone} steps computed "
            "other requests as well: a batch of another shape may round otherwise"
        )
    if logged.replay.cached_tokens:
        causes.append(f"{logged.replay.cached_tokens} tokens of its prompt came from the KV cache")
    return causes
