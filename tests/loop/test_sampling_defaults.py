"""Sampling parameters that a request does not give, over the real daemon with a fake engine in virtual time."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.support.serving import serving
from uma_trio.engine_link.sampling import SamplingParams

OF_MODEL = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}


def params_of(harness: Any) -> SamplingParams:
    [answer] = [*harness.scheduler.answers()]
    return answer.sampling.params


@pytest.mark.parametrize(
    ("of_model", "settings", "request_fields", "expected"),
    [
        ({}, {}, {}, {"temperature": 0.0, "top_k": 0, "repetition_penalty": 1.0}),
        (OF_MODEL, {}, {}, OF_MODEL),
        (OF_MODEL, {"temperature": "0.3"}, {}, OF_MODEL | {"temperature": 0.3}),
        (OF_MODEL, {"temperature": "0"}, {}, OF_MODEL | {"temperature": 0.0}),
        (OF_MODEL, {"temperature": "0.3", "top_k": "5"}, {"top_k": 7}, OF_MODEL | {"temperature": 0.3, "top_k": 7}),
        (OF_MODEL, {"top_k": "5"}, {"temperature": 0, "top_k": 0}, OF_MODEL | {"temperature": 0.0, "top_k": 0}),
        ({}, {"top_p": "0.9"}, {"temperature": 1}, {"temperature": 1.0, "top_p": 0.9}),
    ],
)
async def test_the_request_beats_the_setting_beats_the_model(
    autojump_clock, of_model, settings, request_fields, expected
):
    async with serving(recommended_sampling=of_model, **settings) as harness, harness.client() as client:
        async with contextlib.aclosing(client.generate(prompt="a prompt", max_tokens=2, **request_fields)) as events:
            await anext(events)
            params = params_of(harness)
        assert {name: getattr(params, name) for name in expected} == pytest.approx(expected)
        assert harness.service.describe()["sampling defaults"]["temperature"].split(" ", 1)[1] == (
            "(server)" if "temperature" in settings else "(model)" if of_model else "(built in)"
        )
