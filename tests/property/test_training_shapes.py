"""Pictures of shapes and questions about them: what is drawn is what the answers say."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

from uma_trio.training.drawings import MOST, PAINTS, SHAPES, Scene, draw, some_scene
from uma_trio.training.skills.shapes import about_picture, describe

SIDE = 112


def separate_parts(mask: npt.NDArray[np.bool_]) -> int:
    """How many connected parts ``mask`` has, without single pixels."""
    left, n = {(int(y), int(x)) for y, x in np.argwhere(mask)}, 0
    while left:
        edge, size = [left.pop()], 1
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
            size += len(near)
        n += size > 1
    return n


def test_a_picture_has_as_many_separate_shapes_as_it_says_in_its_colour() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        scene = Scene(1 + seed % MOST, [*PAINTS][seed % len(PAINTS)], SHAPES[seed % len(SHAPES)])
        pixels = draw(scene, rng, SIDE).astype(float)
        background = np.median(pixels.reshape(-1, 3), axis=0)
        differs = np.abs(pixels - background).max(2) > 60
        assert separate_parts(differs) == scene.number, (seed, scene)
        one, other = np.array(PAINTS[scene.colour], float)
        shown = np.median(pixels[differs], axis=0)
        assert (shown > np.minimum(one, other) - 25).all(), (seed, scene, shown)
        assert (shown < np.maximum(one, other) + 25).all(), (seed, scene, shown)


def test_answers_follow_from_the_scene() -> None:
    assert describe(Scene(1, "orange", "cross")) == "An orange cross."
    assert describe(Scene(3, "blue", "cross")) == "Three blue crosses."
    rng, scenes = Random(1), np.random.default_rng(1)
    answers: dict[tuple[Scene, str], str] = {}
    for _ in range(4000):
        scene = some_scene(scenes)
        turn = about_picture(rng, scene)
        assert not set("{}") & set(turn.question + turn.answer)
        asked = (scene, turn.question)
        assert answers.setdefault(asked, turn.answer) == turn.answer, "one question has one right answer"
        assert scene.number or "see no" in turn.answer or "are no" in turn.answer
    assert len({*answers.values()}) > 100
