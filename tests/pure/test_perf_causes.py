"""Where the time of a run went: against devices whose cost is known, and for any records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.cases import all_cases
from tests.support.perf_runs import HEADER, encode_run, simulated
from uma_trio.cli import main
from uma_trio.telemetry.perf_causes import CAUSES, explain
from uma_trio.telemetry.perf_records import Run, TickRecord, Trailer, decode, encode

CALL_MS, ROW_MS, TOKEN_MS, PREFILL_CALL_MS = 8.0, 1.0, 0.1, 4.0
CELL_MS, PAIR_MS = 0.001, 0.0001
"""What the device of these tests takes: for a call, a decode row, a prompt token, prefill in a call, a KV cell that a row
scans, and a pair of a prompt token and a cell."""


def device_ms(tick: TickRecord) -> float:
    pairs = sum(n * tick.prefill_context + n * n / 2 for _, n in tick.prefill_chunks)
    rows = tick.n_decodes + tick.draft_tokens
    fixed = CALL_MS * tick.decode_calls + PREFILL_CALL_MS * bool(tick.prefill_chunks)
    return fixed + ROW_MS * rows + TOKEN_MS * tick.prompt_tokens + CELL_MS * tick.context_tokens + PAIR_MS * pairs


@attrs.define
class Recorder:
    """Records a run of that device, tick by tick."""

    ticks: list[TickRecord] = attrs.field(factory=list)
    now_s: float = 5.0

    def tick(
        self, n_decodes: int = 0, tokens: int = 0, *, times: int = 1, pause_ms: float = 0.0, **fields: Any
    ) -> None:
        """Ticks with so many streams and prompt tokens.

        Args:
            pause_ms: time before each, of which ``idle_ms`` is without requests.
        """
        for _ in range(times):
            tick = TickRecord(
                start_s=self.now_s + pause_ms / 1e3,
                decode_seq_ids=tuple(range(n_decodes)),
                prefill_chunks=((99, tokens),) if tokens else (),
                **{"running": n_decodes + bool(tokens), "host_gap_ms": None if pause_ms else 0.0} | fields,
            )
            tick.decode_ms = fields.get("decode_ms", device_ms(tick) if tick.decode_calls else 0.0)
            self.now_s += (pause_ms + tick.duration_ms) / 1e3
            self.now_s += ((tick.embedding_ms or 0) + (tick.copy_ms or 0) + (tick.draft_model_ms or 0)) / 1e3
            self.ticks.append(tick)

    def wait(self, ms: float) -> None:
        self.now_s += ms / 1e3

    def causes(self) -> dict[str, float]:
        """Milliseconds of the causes that have any."""
        return causes_ms(Run(header=HEADER, ticks=self.ticks))


def causes_ms(run: Run) -> dict[str, float]:
    found = {each["cause"]: 1e3 * each["seconds"] for each in explain(run)["causes"]}
    return {name: ms for name, ms in found.items() if ms > 0.05}


@pytest.fixture
def run() -> Recorder:
    return Recorder()


# -- one cause at a time ------------------------------------------------------------------------------


def test_one_stream_is_decoded_at_its_best(run: Recorder) -> None:
    run.tick(1, times=50)
    assert run.causes() == {"decode": pytest.approx(50 * (CALL_MS + ROW_MS))}


@pytest.mark.parametrize(("present", "cause"), [(4, "narrow_batches"), (1, "few_streams")])
def test_batches_are_narrow_if_more_requests_were_there(run: Recorder, present: int, cause: str) -> None:
    run.tick(4, times=20)
    run.tick(1, times=20, running=present)
    at_best = CALL_MS / 4 + ROW_MS
    excess = 20 * (CALL_MS + ROW_MS - at_best)
    assert run.causes() == {"decode": pytest.approx(100 * at_best), cause: pytest.approx(excess)}


def test_a_batch_can_be_narrow_for_both_reasons(run: Recorder) -> None:
    run.tick(4, times=20)
    run.tick(1, times=20, running=1, queue_depth=1)
    found = run.causes()
    assert found["narrow_batches"] == pytest.approx(20 * (CALL_MS - CALL_MS / 2))
    assert found["few_streams"] == pytest.approx(20 * (CALL_MS / 2 - CALL_MS / 4))


def test_short_chunks_cost_more_for_each_token(run: Recorder) -> None:
    for before in (0, 1000):
        run.tick(tokens=512, times=8, prefill_context=before)
        run.tick(tokens=16, times=32, prefill_context=before)
    best = TOKEN_MS + (CALL_MS + PREFILL_CALL_MS) / 512
    attention = PAIR_MS * (16 * 512**2 / 2 + 64 * 16**2 / 2 + 8 * 512 * 1000 + 32 * 16 * 1000)
    found = run.causes()
    assert found["prefill"] == pytest.approx(18 * 512 * best, rel=0.01)
    assert found["short_chunks"] == pytest.approx(64 * (1.6 + CALL_MS + PREFILL_CALL_MS - 16 * best), rel=0.01)
    assert found["attention"] == pytest.approx(attention, rel=0.01)
    assert set(found) == {"prefill", "short_chunks", "attention"}


def test_prefill_next_to_streams_is_neither_a_narrow_batch_nor_counted_twice(run: Recorder) -> None:
    run.tick(4, times=20)
    run.tick(4, tokens=64, times=10)
    run.tick(4, tokens=64, times=10, prefill_context=1000)
    run.tick(4, tokens=8, times=20)
    found = run.causes()
    assert found["decode"] == pytest.approx(60 * (CALL_MS + 4 * ROW_MS), rel=0.01)
    best = TOKEN_MS + PREFILL_CALL_MS / 64
    assert found["short_chunks"] == pytest.approx(20 * (PREFILL_CALL_MS + 0.8 - 8 * best), rel=0.01)
    assert "narrow_batches" not in found


def test_a_separate_call_for_prefill_is_no_split(run: Recorder) -> None:
    run.tick(4, times=20)
    run.tick(2, times=20)
    run.tick(4, tokens=64, times=10, decode_calls=2)
    run.tick(4, tokens=64, times=10, decode_calls=2, prefill_context=1000)
    run.tick(4, tokens=8, times=20, decode_calls=2)
    found = run.causes()
    best = TOKEN_MS + (CALL_MS + PREFILL_CALL_MS) / 64
    assert "split_calls" not in found
    assert found["short_chunks"] == pytest.approx(20 * (CALL_MS + PREFILL_CALL_MS + 0.8 - 8 * best), rel=0.01)


def test_further_calls_cost_their_fixed_time(run: Recorder) -> None:
    run.tick(4, times=20)
    run.tick(2, times=20)
    run.tick(4, times=10, decode_calls=3)
    assert run.causes()["split_calls"] == pytest.approx(10 * 2 * CALL_MS, rel=0.01)


def test_context_makes_attention_longer(run: Recorder) -> None:
    for context in range(0, 40_000, 400):
        run.tick(4, context_tokens=context)
    total = CELL_MS * sum(range(0, 40_000, 400))
    assert run.causes() == {
        "decode": pytest.approx(100 * (CALL_MS + 4 * ROW_MS), rel=0.01),
        "attention": pytest.approx(total, rel=0.01),
    }


def test_rejected_drafts_and_the_draft_model(run: Recorder) -> None:
    run.tick(1, times=20)
    run.tick(2, times=20)
    run.tick(1, times=10, draft_tokens=5, accepted_draft_tokens=2, model_draft_tokens=5, draft_model_ms=3.0)
    assert run.causes()["draft_tokens"] == pytest.approx(10 * (3 * ROW_MS + 3.0), rel=0.01)


def test_slow_ticks_do_not_change_what_others_cost(run: Recorder) -> None:
    run.tick(2, times=50)
    run.tick(2, decode_ms=500.0)
    run.tick(2, times=50)
    usual = CALL_MS + 2 * ROW_MS
    assert run.causes() == {
        "decode": pytest.approx(100 * usual + 1.5 * usual, rel=0.01),
        "slow_ticks": pytest.approx(500 - 1.5 * usual, rel=0.01),
    }


def test_what_was_lost_is_computed_again(run: Recorder) -> None:
    run.tick(tokens=256, times=10)
    run.tick(tokens=256, times=10, recomputed_tokens=64)
    found = run.causes()
    assert found["recomputation"] == pytest.approx(sum(found.values()) / 8, rel=0.001)


def test_time_around_the_calls(run: Recorder) -> None:
    run.tick(1, times=20)
    run.tick(1, times=10, sample_ms=3.0, mask_wait_ms=2.0)
    run.tick(1, times=10, embedding_ms=5.0, copy_ms=1.0)
    run.tick(decode_calls=0, embedding_ms=7.0)
    found = run.causes()
    names = ("sampling", "masks", "embeddings", "kv_copies")
    assert [found[name] for name in names] == pytest.approx([10, 20, 57, 10])


def test_time_between_the_ticks(run: Recorder) -> None:
    run.tick(1, times=10, pause_ms=1000.0, idle_ms=900.0)
    for _ in range(10):
        run.wait(2.0)
        run.tick(1, host_gap_ms=2.0)
    found = run.causes()
    assert [found[name] for name in ("idle", "waiting", "host")] == pytest.approx([9 * 900, 9 * 100, 20])
    assert "not_recorded" not in found


def test_missing_records_are_not_hidden(run: Recorder) -> None:
    run.tick(1, times=100)
    del run.ticks[20:50]
    found = run.causes()
    assert found["not_recorded"] == pytest.approx(30 * (CALL_MS + ROW_MS))
    assert found["decode"] == pytest.approx(70 * (CALL_MS + ROW_MS))


# -- everything together -------------------------------------------------------------------------------


@all_cases("seed", range(8))
def test_a_noisy_run_adds_up(seed: int) -> None:
    run = simulated(seed)
    found = explain(run)
    seconds = {each["cause"]: each["seconds"] for each in found["causes"]}
    assert found["wall_s"] == pytest.approx(run.ticks[-1].end_s - run.ticks[0].start_s)
    assert sum(seconds.values()) == pytest.approx(found["wall_s"], rel=0.001)
    assert seconds["not_recorded"] < 0.001 * found["wall_s"]
    assert sum(each["share"] for each in found["causes"]) == pytest.approx(1, abs=0.001)
    assert seconds["host"] == pytest.approx(sum(tick.host_gap_ms or 0 for tick in run.ticks) / 1e3, rel=0.01)
    assert 0 < seconds["slow_ticks"] < 0.1 * found["wall_s"]
    assert list(seconds) == list(CAUSES)


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


any_ms = st.floats(-10, 1e6, allow_nan=False) | st.none()
any_tick = st.builds(
    TickRecord,
    start_s=st.floats(0, 1e6),
    decode_seq_ids=st.lists(sizes(300), max_size=9),
    prefill_chunks=st.lists(st.tuples(sizes(300), sizes(8192)), max_size=4),
    recomputed_tokens=sizes(9000),
    context_tokens=sizes(1 << 20),
    prefill_context=st.floats(0, 1e6),
    decode_calls=sizes(9),
    draft_tokens=sizes(99),
    accepted_draft_tokens=sizes(120),
    draft_model_ms=any_ms,
    decode_ms=st.floats(-10, 1e6),
    sample_ms=st.floats(-10, 1e6),
    mask_wait_ms=any_ms,
    embedding_ms=any_ms,
    copy_ms=any_ms,
    host_gap_ms=any_ms,
    idle_ms=any_ms,
    running=sizes(999),
    queue_depth=sizes(999),
)


@given(st.lists(any_tick, max_size=12))
def test_causes_are_never_negative_and_cover_the_wall_time(ticks: list[TickRecord]) -> None:
    found = explain(Run(header=HEADER, ticks=ticks))
    assert all(each["seconds"] >= 0 for each in found["causes"])
    total = sum(each["seconds"] for each in found["causes"])
    assert total >= found["wall_s"] * (1 - 1e-6) - 1e-4
    json.dumps(found, allow_nan=False)


# -- the command ---------------------------------------------------------------------------------------


def shown(*args: object) -> Result:
    return CliRunner().invoke(main, ["perf", "explain", *map(str, args)], prog_name="uma-trio")


def test_the_text_has_the_causes_with_the_most_time_first(tmp_path: Path) -> None:
    run = simulated()
    file = tmp_path / "perf.jsonl"
    file.write_bytes(encode_run(run))
    result = shown(file)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 110
    found = json.loads(shown(file, "--json").output)
    assert found == {"run": 1, "runs_in_log": 1, "model": "some-model.gguf", **explain(decode(file.read_bytes())[0])}
    for kind in ("work", "lost", "none"):
        causes = [each for each in found["causes"] if each["kind"] == kind and each["seconds"] > 0]
        at = [
            result.output.index(f"\n  {each['cause']} ") for each in sorted(causes, key=lambda each: -each["seconds"])
        ]
        assert at == sorted(at)
        for each in causes:
            assert f" {each['seconds']:,.3f} s " in result.output
            assert each["remedy"] in result.output


def test_a_log_of_several_starts_and_several_files(tmp_path: Path) -> None:
    run = simulated()
    older, newer = tmp_path / "perf.1", tmp_path / "perf"
    older.write_bytes(
        encode_run(Run(header=replace(HEADER, model="other"), ticks=run.ticks[:30]))
        + encode_run(Run(header=HEADER, ticks=run.ticks[:700]))
    )
    newer.write_bytes(encode_run(attrs.evolve(run, ticks=run.ticks[700:])))
    whole, first = (json.loads(shown(older, newer, "--json", *run).output) for run in ((), ("--run", "1")))
    assert (whole["run"], whole["runs_in_log"], whole["ticks"]) == (2, 2, len(run.ticks))
    assert (first["model"], first["ticks"]) == ("other", 30)
    seconds = {each["cause"]: each["seconds"] for each in whole["causes"]}
    assert seconds == pytest.approx({each["cause"]: each["seconds"] for each in explain(run)["causes"]}, abs=0.01)


def test_the_second_file_alone_begins_with_its_first_tick(tmp_path: Path) -> None:
    run = simulated()
    file = tmp_path / "perf"
    file.write_bytes(encode_run(attrs.evolve(run, ticks=run.ticks[700:]))[:-200])
    found = json.loads(shown(file, "--json").output)
    assert sum(each["seconds"] for each in found["causes"]) == pytest.approx(found["wall_s"], rel=0.01)


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "perf"
    data = encode_run(attrs.evolve(simulated(), trailer=Trailer(dropped_records=40)))
    file.write_bytes(data.replace(b'{"kind":"tick"', b'{"kind"', 2))
    assert json.loads(shown(file, "--json").output)["missing_records"] == 42


def test_a_log_without_ticks_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "perf"
    file.write_bytes(encode(HEADER))
    result = shown(file)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "has no ticks" in result.output
