"""Questions about a picture of some shapes."""

from __future__ import annotations

from random import Random
from typing import Final

from uma_trio.training.drawings import PAINTS, SHAPES, Scene
from uma_trio.training.sample import Turn

NUMBERS: Final = ("no", "one", "two", "three", "four")
NOTHING: Final = "I see no shapes."

WHAT: Final = (
    "What is this?",
    "What do you see?",
    "What is in the picture?",
    "What is in this picture?",
    "Describe the picture.",
    "Describe this picture.",
    "What does the picture show?",
    "What does this picture show?",
    "What can you see?",
    "What's this?",
    "What is that?",
    "Tell me what you see.",
    "What is on the picture?",
    "What are these?",
    "Describe what you see.",
)
HOW_MANY: Final = (
    "How many are there?",
    "How many shapes are there?",
    "How many shapes do you see?",
    "How many {shapes} are there?",
    "How many {shapes} do you see?",
    "How many {colour} {shapes} are there?",
    "How many {colour} {shapes} do you see?",
    "How many {colour} {shapes}?",
    "How many {shapes}?",
    "Count the {shapes}.",
    "Count the {colour} {shapes}.",
    "Count the shapes.",
)
WHICH_COLOUR: Final = (
    "What colour is it?",
    "What color is it?",
    "Which colour is it?",
    "What colour is this?",
    "What colour are they?",
    "Which colour has it?",
    "Which colour do you see?",
    "What colour is the {shape}?",
    "What colour are the {shapes}?",
    "What color are the {shapes}?",
)
WHICH_SHAPE: Final = (
    "What shape is it?",
    "What shape is this?",
    "Which shape is it?",
    "Which shape do you see?",
    "What kind of shape is it?",
    "What shapes are they?",
    "Which shapes are there?",
    "What shape is the {colour} one?",
)


def of_scene(scene: Scene) -> str:
    """What a picture shows, in words."""
    if scene.number == 1:
        return f"{'an' if scene.colour == 'orange' else 'a'} {scene.colour} {scene.shape}"
    return f"{NUMBERS[scene.number]} {scene.colour} {_several(scene.shape)}"


def describe(scene: Scene) -> str:
    """The answer to ``WHAT``."""
    words = of_scene(scene)
    return f"{words[0].upper()}{words[1:]}." if scene.number else NOTHING


def about_picture(rng: Random, scene: Scene) -> Turn:
    """A question about a picture, with its answer."""
    kinds = (_what, _how_many, _which_colour, _which_shape)
    return rng.choices(kinds, weights=(9, 6, 3, 3))[0](rng, scene)


def _what(rng: Random, scene: Scene) -> Turn:
    return Turn(rng.choice(WHAT), describe(scene))


def _how_many(rng: Random, scene: Scene) -> Turn:
    asked = scene
    if rng.random() < 0.25:
        asked = Scene(0, rng.choice([*PAINTS]), rng.choice(SHAPES))
    question = rng.choice(HOW_MANY)
    same = scene.number > 0
    same &= "{shapes}" not in question or asked.shape == scene.shape
    same &= "{colour}" not in question or asked.colour == scene.colour
    if same:
        counted = f"one {scene.colour} {scene.shape}" if scene.number == 1 else of_scene(scene)
        answer = f"There {'is' if scene.number == 1 else 'are'} {counted}."
    elif "{shapes}" in question:
        named = question[question.index("{") : question.rindex("}") + 1]
        answer = _filled(f"There are no {named}.", asked)
    else:
        answer = NOTHING
    return Turn(_filled(question, asked), answer)


def _which_colour(rng: Random, scene: Scene) -> Turn:
    question = _filled(rng.choice(WHICH_COLOUR), scene)
    return Turn(
        question, f"{'It is' if scene.number == 1 else 'They are'} {scene.colour}." if scene.number else NOTHING
    )


def _which_shape(rng: Random, scene: Scene) -> Turn:
    question = _filled(rng.choice(WHICH_SHAPE), scene)
    if not scene.number:
        return Turn(question, NOTHING)
    return Turn(question, f"It is a {scene.shape}." if scene.number == 1 else f"They are {_several(scene.shape)}.")


def _filled(text: str, scene: Scene) -> str:
    return text.format(colour=scene.colour, shape=scene.shape, shapes=_several(scene.shape))


def _several(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"
