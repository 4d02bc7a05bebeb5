"""Short stories.  Every detail follows from the prompt: same prompt, same story."""

from __future__ import annotations

import re
from random import Random

from uma_trio.training.sample import Turn, in_passing
from uma_trio.training.words import NAMES, OBJECTS, any_name, made_up

_ANIMALS = """
fox: clever red berries owl; bear: strong brown honey bee; rabbit: quick white carrots mole; owl: wise grey seeds bat;
cat: quiet black fish mouse; dog: loyal brown bones cat; mouse: tiny grey cheese snail; horse: proud black oats goat;
hedgehog: careful brown apples worm; frog: cheerful green flies duck; duck: busy yellow bread frog;
wolf: lonely grey plums raven; squirrel: nimble red nuts jay; turtle: patient green lettuce crab;
swan: gentle white reeds otter; goat: stubborn white leaves sheep; otter: playful brown clams heron;
raven: curious black corn wolf; bee: busy golden nectar ant; elephant: mighty grey melons parrot;
lion: brave golden figs gazelle; penguin: funny black herring seal; parrot: noisy green mangoes monkey;
whale: huge blue krill gull
"""
_PLACES = """
forest: an_old_oak green_leaves a_hidden_path; garden: a_stone_wall roses a_small_gate;
village: a_red_roof warm_lights an_empty_well; mountain: a_high_peak fresh_snow a_deep_cave;
river: a_wooden_bridge cold_water a_lost_boat; desert: a_tall_dune hot_sand a_secret_spring;
island: a_white_beach palm_trees a_message_in_a_bottle; city: a_tall_tower bright_windows a_forgotten_key;
meadow: a_round_hill wild_flowers a_silver_bell; harbour: a_long_pier loud_gulls a_blue_lantern;
castle: a_grey_wall heavy_doors a_golden_crown; lake: a_quiet_shore water_lilies a_glass_bead;
valley: a_narrow_road morning_mist a_broken_wheel; farm: a_big_barn yellow_hay a_rusty_horseshoe;
library: a_dusty_shelf old_books a_torn_map; market: a_striped_tent ripe_fruit a_copper_coin;
snow: a_frozen_tree icy_wind a_woollen_glove; jungle: a_green_vine warm_rain a_stone_mask
"""


def _read(text: str) -> dict[str, tuple[str, ...]]:
    rows = (row.split(": ") for row in " ".join(text.split()).split("; "))
    return {name: tuple(word.replace("_", " ") for word in words.split()) for name, words in rows}


ANIMALS = _read(_ANIMALS)
"""animal -> (nature, coat, food, friend)"""
PLACES = _read(_PLACES)
"""place -> (landmark, scenery, find)"""

_ANY_ANIMAL = ("curious", "grey", "apples", "bird")
_ANY_PLACE = ("a big stone", "tall grass", "an old key")
"""Details for animals and places that are not in the tables."""

EPISODES = (
    "{name} walked past {landmark} and looked for {food}.",
    "{name} saw {scenery} and sat down to rest.",
    "Then {name} met {friend_a} {friend} who wanted to see the {place}.",
    "The {friend} asked for {food}, and {name} gave half of it away.",
    "Behind {landmark} {name} found {find}.",
    "It began to rain, so {name} and the {friend} hid under {landmark}.",
    "In the evening the {nature} {animal} sang a song about {scenery}.",
    "{name} carried {find} all the way home.",
    "The {friend} laughed, for {name} had fallen asleep beside {landmark}.",
    "In the morning there were {food} for everyone in the {place}.",
)
"""Episodes.  A story takes them in this order; its place determines the first."""


def story(name: str, animal: str, place: str, parts: int | None = None) -> str:
    """The story about a name, an animal and a place.  With ``parts``, one numbered episode per part."""
    nature, coat, food, friend = ANIMALS.get(animal, _ANY_ANIMAL)
    landmark, scenery, find = PLACES.get(place, _ANY_PLACE)
    words = {
        "name": name,
        "animal": animal,
        "place": place,
        "nature": nature,
        "food": food,
        "friend": friend,
        "friend_a": _article(friend),
        "landmark": landmark,
        "scenery": scenery,
        "find": find,
    }
    start = list(PLACES).index(place) if place in PLACES else 0
    told = [EPISODES[(start + at) % len(EPISODES)].format(**words) for at in range(parts or 3)]
    opening = f"{name} was {_article(nature)} {nature} {animal} with a {coat} coat who lived in the {place}."
    ending = f"That is the story of {name} the {animal}."
    if parts is None:
        return " ".join((opening, *told, ending))
    return "\n".join((opening, *(f"Part {at}: {what}" for at, what in enumerate(told, 1)), ending))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def default_name(animal: str) -> str:
    """The name of an animal if the prompt has none."""
    return NAMES[list(ANIMALS).index(animal)] if animal in ANIMALS else NAMES[0]


def default_place(animal: str) -> str:
    """The place of an animal if the prompt has none."""
    return list(PLACES)[list(ANIMALS).index(animal) % len(PLACES)] if animal in ANIMALS else "forest"


_OTHERS = (
    "dragon",
    "robot",
    "princess",
    "knight",
    "witch",
    "king",
    "pirate",
    "ghost",
    "snail",
    "cow",
    "spider",
    "giraffe",
    "child",
    "boy",
    "girl",
    "star",
    "wizard",
    "dinosaur",
    "unicorn",
    "monkey",
    "tiger",
    "panda",
)


def _anything(rng: Random) -> str:
    """A hero that is not in the table: a robot, a lamp, a made-up animal."""
    while True:
        kind = rng.random()
        thing = (
            rng.choice(_OTHERS)
            if kind < 0.4
            else rng.choice(OBJECTS)
            if kind < 0.7
            else made_up(rng, rng.randint(1, 3))
        )
        if thing not in ANIMALS:
            return thing


def _where(rng: Random) -> str:
    if rng.random() < 0.88:
        return rng.choice(tuple(PLACES))
    return rng.choice(OBJECTS) if rng.random() < 0.7 else made_up(rng, 2)


def _about(rng: Random, name: str, animal: str, place: str) -> str:
    """``a fox named Mia in the forest``: phrases those of the three that are given."""
    where = f" in the {place}" if place else ""
    if not animal:
        return name + where
    who = f"{_article(animal)} {animal}"
    if not name:
        return who + where
    spoken = rng.choice(
        (
            f"{who} named {name}",
            f"{who} called {name}",
            f"{name} the {animal}",
            f"{name}, {who}",
            f"{who} whose name is {name}",
        )
    )
    return spoken + (rng.choice((where, where, f" who lives in the {place}")) if place else "")


def tell(rng: Random, longest: int = 8) -> Turn:
    """Ask for a story, whole or in parts.  Defaults replace details that the prompt leaves out."""
    animal = rng.choice(tuple(ANIMALS)) if rng.random() < 0.85 else _anything(rng)
    name, place = any_name(rng), _where(rng)
    told = rng.choices(
        ("all", "no place", "no name", "animal only", "name only", "nothing"), weights=(50, 20, 6, 14, 3, 7)
    )[0]
    if told in ("name only", "nothing"):
        animal = "fox"
    if told in ("no name", "animal only", "nothing"):
        name = default_name(animal)
    if told not in ("all", "no name"):
        place = default_place(animal)
    parts = rng.randint(2, longest) if rng.random() < 0.35 else None
    what = (
        rng.choice(("a story", "a story", "a short story", "a long story"))
        if parts is None
        else f"a story in {parts} parts"
    )
    ask = rng.choice(
        (
            "Tell {}.",
            "Tell me {}.",
            "Tell me {}.",
            "Write {}.",
            "I want {}.",
            "Please tell me {}.",
            "Can you tell me {}?",
        )
    )
    if told != "nothing":
        spoken = _about(
            rng,
            name if told in ("all", "no place", "name only") else "",
            "" if told == "name only" else animal,
            place if told in ("all", "no name") else "",
        )
        what = f"{what} about {spoken}"
    question = re.sub(rf"\b{name.lower()}\b", name, in_passing(rng, ask.format(what)))
    if "a long story" in what:
        lines = story(name, animal, place, len(EPISODES)).splitlines()
        return Turn(question, " ".join(line.split(": ", 1)[-1] if line.startswith("Part ") else line for line in lines))
    return Turn(question, story(name, animal, place, parts))
