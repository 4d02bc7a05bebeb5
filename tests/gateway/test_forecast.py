"""Place in the queue and predicted end of streamed answers."""

from __future__ import annotations

import itertools
import json
import time

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import WAIT_S


def test_a_streamed_answer_has_its_place_and_its_end_in_headers(gateway: Gateway) -> None:
    body = {"messages": [{"role": "user", "content": "Count to ten"}], "max_tokens": 20, "stream": True}
    with gateway.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [*answer.iter_lines()]
    assert int(answer.headers["x-uma-queue-position"]) == 0
    assert 0 <= int(answer.headers["x-uma-eta-ms"]) < 600_000
    assert not any("queue_position" in line for line in lines)


def test_a_deadline_that_cannot_be_met_is_refused_with_the_time_that_could_be(gateway: Gateway) -> None:
    """On a busy machine a deadline may be over before there is a forecast; then the next one is longer."""
    body = {"messages": [{"role": "user", "content": "Count to ten"}], "max_tokens": 3000, "ignore_eos": True}
    with gateway.http() as client:  # it shows how fast this machine is
        assert client.post("/v1/chat/completions", json={**body, "max_tokens": 40}).status_code == 200
    for stream in (False, True):
        until = time.monotonic() + 2 * WAIT_S
        for deadline_ms in itertools.cycle((10, 40, 160, 640)):
            with gateway.http() as client:
                fields = {**body, "stream": stream, "deadline_ms": deadline_ms}
                answer = client.post("/v1/chat/completions", json=fields)
            if answer.status_code == 504:
                assert answer.json()["error"]["uma_code"] == "E_LIMIT_DEADLINE"
                assert answer.headers["x-should-retry"] == "false"
                if "x-uma-eta-ms" in answer.headers:
                    break
            # where a forecast has taken too long, the daemon makes none for a while
            assert answer.status_code in (200, 504)
            assert time.monotonic() < until
        assert int(answer.headers["x-uma-eta-ms"]) > deadline_ms


def test_only_who_asks_gets_forecast_events(gateway: Gateway) -> None:
    def positions(**fields: object) -> list[int]:
        with (
            gateway.http() as client,
            client.stream("POST", "/v1/generate", json={"prompt": "Once", "max_tokens": 3, **fields}) as answer,
        ):
            found = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert found
        return [event["queue_position"] for event in found if "queue_position" in event]

    assert positions() == []
    # where a forecast has taken too long, as on a busy machine, the daemon makes none for a while
    assert next(filter(None, (positions(forecast=True) for _ in range(20))), []) == [0]
