"""The embedded model sees: what it answers depends on what is in a picture."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

import llama_abi
from tests.support.commands import invoke
from tests.support.pictures import png
from tests.support.real_daemon import ROOT, Daemon, real_daemon
from uma_trio.training.drawings import Scene, draw
from uma_trio.training.skills.shapes import WHAT, about_picture, describe

SCENES = (
    Scene(1, "red", "circle"),
    Scene(2, "blue", "square"),
    Scene(3, "green", "triangle"),
    Scene(4, "black", "cross"),
    Scene(1, "yellow", "square"),
    Scene(2, "purple", "circle"),
    Scene(3, "orange", "cross"),
    Scene(1, "blue", "triangle"),
)
PHRASINGS = 8
MOST_WRONG = 4
"""The most of all answers that may be wrong, since rounding differs between machines."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    if not llama_abi.load().stamp.mtmd_sha256:
        pytest.skip("the library has no libmtmd: ./build_llama.sh --dev builds it")
    with real_daemon() as found:
        yield found


def answer(daemon: Daemon, file: bytes, question: str) -> str:
    parts = [{"type": "image", "data": file}, {"type": "text", "text": question}]
    asked = daemon.ask(
        messages=[{"role": "user", "content": parts}], max_tokens=24, temperature=0, stream=False, encoding="cbor"
    )
    return asked.text


def test_it_says_what_is_in_pictures_that_it_has_never_seen(daemon: Daemon) -> None:
    wrong = []
    for n, scene in enumerate(SCENES):
        file = png(draw(scene, np.random.default_rng(10**9 + n), side=(200, 224, 337)[n % 3]))
        phrasings = [(question, describe(scene)) for question in WHAT[n::8]]
        rng = Random(n)
        while len(phrasings) < PHRASINGS:
            turn = about_picture(rng, scene)
            phrasings.append((turn.question, turn.answer))
        found = [(question, answer(daemon, file, question), expected) for question, expected in phrasings]
        wrong += [each for each in found if each[1] != each[2]]
    assert len(wrong) <= MOST_WRONG, wrong


def test_a_newcomer_asks_about_the_picture_of_the_documents(daemon: Daemon) -> None:
    for question, expected in (
        ("What is this?", "Two red circles."),
        ("How many red circles?", "There are two red circles."),
    ):
        asked = invoke("ask", "--image", str(ROOT / "docs" / "shapes.png"), question, UMA_SOCKET=str(daemon.socket))
        assert asked.stdout.strip() == expected
    without = invoke("ask", "What is the capital of France?", UMA_SOCKET=str(daemon.socket))
    assert without.stdout.strip() == "The capital of France is Paris."
