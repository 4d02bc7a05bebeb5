"""What the metrics say of requests, in virtual time: histograms, principals, constraints."""

from __future__ import annotations

import pytest
import trio

from tests.support.fake_engine import FakeEngine
from tests.support.serving import serving
from uma_trio.client import ServerError
from uma_trio.telemetry.measures import REQUEST_MS


async def test_histograms_add_up_to_what_clients_saw(autojump_clock):
    async with serving(FakeEngine(n_seq_max=2), speculation=False) as harness:
        ends = []

        async def ask(n: int) -> None:
            async with harness.client() as client:
                ends.append(await client.complete(prompt="p" * 10 * n, max_tokens=n))

        async with trio.open_nursery() as nursery:
            for n in range(1, 7):
                nursery.start_soon(ask, n)
        await harness.settled()
        found = harness.server.snapshot()["histograms"]
        for name, field in (("ttft_ms", "ttft_ms"), ("request_ms", "total_ms"), ("request_queue_ms", "queue_ms")):
            seen = [getattr(end.timings, field) for end in ends]
            assert found[name]["count"] == 6
            assert found[name]["counts"] == [sum(ms <= bound for ms in seen) for bound in REQUEST_MS]
            assert found[name]["sum"] == pytest.approx(sum(seen), abs=0.01)
        parts = [found[f"request_{name}_ms"]["sum"] for name in ("queue", "prefill", "decode")]
        assert sum(parts) == pytest.approx(found["request_ms"]["sum"], abs=0.01)
        assert found["request_queue_ms"]["sum"] > 0, "two ran at a time"
        assert found["inter_token_ms"]["count"] == sum(range(6))
        assert found["request_prompt_tokens"]["sum"] == sum(end.usage.prompt_tokens for end in ends)
        assert found["request_tokens"]["sum"] == sum(range(7))
        snapshot = harness.server.snapshot()
        assert found["tick_ms"]["count"] == found["batch"]["count"] == snapshot["ticks_total"]
        assert found["batch"]["sum"] / found["batch"]["count"] == pytest.approx(snapshot["avg_batch"], abs=0.001)
        assert found["batch"]["counts"][:2] == [found["batch"]["counts"][0], found["batch"]["count"]]


async def test_a_cancelled_request_is_no_complete_answer(autojump_clock):
    async with serving() as harness, harness.client() as client:
        async for _ in client.generate(id="a", prompt="once", max_tokens=1000):
            await client.cancel("a")
        found = harness.server.snapshot()["histograms"]
        assert found["ttft_ms"]["count"] == found["request_queue_ms"]["count"] == 1
        assert found["request_ms"]["count"] == found["request_decode_ms"]["count"] == 0


async def test_each_principal_has_its_counts(autojump_clock):
    async with serving() as harness, harness.client() as client:
        for name, n in (("a", 3), ("b", 5), ("a", 7)):
            end = await client.complete(prompt="hello " * 40, max_tokens=n, principal=name, keep_alive=True)
            assert end.usage.completion_tokens == n
        found = harness.server.snapshot()["principals"]
        assert {name: counts["tokens_total"] for name, counts in found.items()} == {"a": 10, "b": 5}
        assert {name: counts["requests_total"] for name, counts in found.items()} == {"a": 2, "b": 1}
        assert found["b"]["prompt_tokens_total"] == 240
        assert found["a"]["prompt_tokens_total"] + found["a"]["cached_tokens_total"] == 480
        assert found["a"]["cached_tokens_total"] > 0
        async for _ in client.generate(prompt="hello", max_tokens=2, principal="b"):
            assert harness.server.snapshot()["principals"]["b"]["running"] <= 1
            assert harness.server.snapshot()["principals"]["a"]["running"] == 0


async def test_constraints_are_counted_by_what_became_of_them(autojump_clock):
    async with serving() as harness, harness.client() as client:
        for _ in range(3):
            await client.complete(
                prompt="a", max_tokens=2, constraint={"regex": "([1-4][0-9]{2} ){3}"}, keep_alive=True
            )
        for constraint in ({"regex": "["}, {"regex": "a" * 65_536}):
            with pytest.raises(ServerError):
                await client.complete(prompt="a", max_tokens=2, constraint=constraint, keep_alive=True)
        assert harness.server.snapshot()["constraints"] == {
            "compiled_total": 1,
            "reused_total": 2,
            "refused_total": 2,
        }
