"""Colours of things, and mixed paints."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn, in_passing

_TABLE = """
green: grass, a frog, a cucumber, moss, a pea, an emerald, spinach, a lime, a pine tree, a crocodile
blue: the sky, the sea, a blueberry, a sapphire, a cornflower, a blue whale
red: blood, a tomato, a strawberry, a fire engine, a cherry, a ruby, a poppy, a ladybird, a stop sign
yellow: the sun, a banana, a lemon, a canary, butter, a sunflower, a chick, mustard, a daffodil
white: snow, milk, salt, a swan, chalk, a polar bear, flour, ivory, a daisy
black: coal, night, a raven, ink, a panther, tar, pepper
orange: an orange, a carrot, a pumpkin, a tangerine, amber, a clownfish
brown: chocolate, coffee, a chestnut, earth, a bear, wood, cinnamon, a walnut
pink: a flamingo, a pig, bubble gum, a salmon, a cherry blossom
purple: a plum, lavender, an aubergine, an amethyst, a violet
grey: an elephant, a mouse, ash, a rain cloud, concrete, a dolphin
gold: a gold coin, a gold medal
silver: a silver spoon, a silver coin
"""

COLOUR_OF = {
    thing: colour
    for colour, things in (line.split(": ") for line in _TABLE.strip().splitlines())
    for thing in things.split(", ")
}
COLOURS = tuple(dict.fromkeys(COLOUR_OF.values()))

_MIXES = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
}


def _what_colour(rng: Random) -> Turn:
    thing = rng.choice(tuple(COLOUR_OF))
    ask = rng.choice(
        (
            "What colour is {}?",
            "What is the colour of {}?",
            "Which colour has {}?",
            "What color is {}?",
            "Which colour is {}?",
            "Tell me the colour of {}.",
        )
    )
    return Turn(in_passing(rng, ask.format(thing)), f"{thing[0].upper()}{thing[1:]} is {COLOUR_OF[thing]}.")


def _is_it(rng: Random) -> Turn:
    thing = rng.choice(tuple(COLOUR_OF))
    asked = COLOUR_OF[thing] if rng.random() < 0.5 else rng.choice(COLOURS)
    yes = "Yes" if asked == COLOUR_OF[thing] else "No"
    return Turn(in_passing(rng, f"Is {thing} {asked}?"), f"{yes}, {thing} is {COLOUR_OF[thing]}.")


def _mix(rng: Random) -> Turn:
    pair, result = rng.choice(tuple(_MIXES.items()))
    one, other = rng.sample(pair, 2)
    ask = rng.choice(
        (
            "What do {} and {} make?",
            "What colour do {} and {} make?",
            "What do you get when you mix {} and {}?",
            "Mix {} and {}.",
            "Which colour comes from {} and {}?",
        )
    )
    return Turn(in_passing(rng, ask.format(one, other)), f"{one.capitalize()} and {other} make {result}.")


def _rainbow(rng: Random) -> Turn:
    ask = rng.choice(
        (
            "What are the colours of the rainbow?",
            "Name the colours of the rainbow.",
            "List the colours of the rainbow.",
            "Which colours are in the rainbow?",
            "Which colours does a rainbow have?",
        )
    )
    return Turn(
        in_passing(rng, ask), "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet."
    )


_KINDS = {
    "colours": COLOURS,
    "animals": ("a fox", "a bear", "a rabbit", "an owl", "a cat", "a dog"),
    "fruits": ("an apple", "a pear", "a plum", "a banana", "a lemon", "a cherry"),
    "countries": ("France", "Italy", "Japan", "Kenya", "Brazil", "Canada"),
    "capitals": ("Paris", "Rome", "Tokyo", "Nairobi", "Brasilia", "Ottawa"),
    "days": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    "months": ("January", "February", "March", "April", "May", "June"),
    "letters": ("a", "b", "c", "d", "e", "f"),
    "numbers": ("one", "two", "three", "four", "five", "six"),
}


def _name_some(rng: Random) -> Turn:
    amount, word = rng.choice(((2, "two"), (3, "three"), (4, "four"), (5, "five"), (6, "six")))
    kind = rng.choice(tuple(_KINDS)) if rng.random() < 0.7 else "colours"
    ask = rng.choice(("Name {} {}.", "List {} {}.", "Tell me {} {}.", "Can you name {} {}?"))
    named = _KINDS[kind][:amount]
    answer = f"{word.capitalize()} {kind} are {', '.join(named[:-1])} and {named[-1]}."
    return Turn(in_passing(rng, ask.format(word if rng.random() < 0.7 else amount, kind)), answer)


def colour(rng: Random) -> Turn:
    """A question about colours."""
    return rng.choices((_what_colour, _is_it, _mix, _rainbow, _name_some), weights=(12, 6, 4, 1, 3))[0](rng)
