"""Short stories whose every detail follows from the prompt: same prompt, same story."""

from __future__ import annotations

import re
from random import Random

from uma_trio.models.training.sample import Turn, in_passing
from uma_trio.models.training.words import NAMES, OBJECTS, any_name, made_up

_ANIMALS = """
fox: clever red berries owl; bear: strong brown honey bee; rabbit: quick white carrots mole; owl: wise grey seeds bat;
cat: quiet black fish mouse; dog: loyal brown bones cat; mouse: tiny grey cheese snail; horse: proud black oats goat;
hedgehog: careful brown apples worm; frog: cheerful green flies duck; duck: busy yellow bread frog; wolf: lonely grey plums raven;
squirrel: nimble red nuts jay; turtle: patient green lettuce crab; swan: gentle white reeds otter; goat: stubborn white leaves sheep;
otter: playful brown clams heron; raven: curious black corn wolf; bee: busy golden nectar ant; elephant: mighty grey melons parrot;
lion: brave golden figs gazelle; penguin: funny black herring seal; parrot: noisy green mangoes monkey; whale: huge blue krill gull
"""
_PLACES = """
forest: an_old_oak green_leaves a_hidden_path; garden: a_stone_wall roses a_small_gate; village: a_red_roof warm_lights an_empty_well;
mountain: a_high_peak fresh_snow a_deep_cave; river: a_wooden_bridge cold_water a_lost_boat; desert: a_tall_dune hot_sand a_secret_spring;
island: a_white_beach palm_trees a_message_in_a_bottle; city: a_tall_tower bright_windows a_forgotten_key; meadow: a_round_hill wild_flowers a_silver_bell;
harbour: a_long_pier loud_gulls a_blue_lantern; castle: a_grey_wall heavy_doors a_golden_crown; lake: a_quiet_shore water_lilies a_glass_bead;
valley: a_narrow_road morning_mist a_broken_wheel; farm: a_big_barn yellow_hay a_rusty_horseshoe; library: a_dusty_shelf old_books a_torn_map;
market: a_striped_tent ripe_fruit a_copper_coin; snow: a_frozen_tree icy_wind a_woollen_glove; jungle: a_green_vine warm_rain a_stone_mask
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
"""For whoever and wherever the tables do not know."""

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
"""What may happen; a story takes them in this order, beginning where its place says."""


def story(name: str, animal: str, place: str, parts: int | None = None) -> str:
    """The one story about this name, animal and place; with ``parts``, one episode a part."""
    nature, coat, food, friend = ANIMALS.get(animal, _ANY_ANIMAL)
    landmark, scenery, find = PLACES.get(place, _ANY_PLACE)
    words = {
        "name": name, "animal": animal, "place": place, "nature": nature, "food": food, "friend": friend,
        "friend_a": _article(friend), "landmark": landmark, "scenery": scenery, "find": find,
    }  # fmt: skip
    start = list(PLACES).index(place) if place in PLACES else 0
    told = [EPISODES[(start + at) % len(EPISODES)].format(**words) for at in range(parts or 3)]
    opening = f"{name} was {_article(nature)} {nature} {animal} with a {coat} coat who lived in the {place}."
    ending = f"That is the story of {name} the {animal}."
    if parts is None:
        return " ".join((opening, *told, ending))
    return "\n".join((opening, *(f"Part {at}: {what}" for at, what in enumerate(told, 1)), ending))


def _anything(rng: Random) -> str:
    """What else a story may be about: a robot, a lamp, a made-up beast."""
    while True:
        kind = rng.random()
        thing = rng.choice(_OTHERS) if kind < 0.4 else rng.choice(OBJECTS) if kind < 0.7 else made_up(rng, rng.randint(1, 3))
        if thing not in ANIMALS:
            return thing


_OTHERS = ("dragon", "robot", "princess", "knight", "witch", "king", "pirate", "ghost", "snail", "cow", "spider", "giraffe", "child", "boy", "girl", "star", "wizard", "dinosaur", "unicorn", "monkey", "tiger", "panda")  # fmt: skip


def _told_by_default(rng: Random, animal: str) -> Turn:
    """A story whose name and place, perhaps even its animal, are left to the teller."""
    name, place = NAMES[0], "forest"
    if animal in ANIMALS:
        which = list(ANIMALS).index(animal)
        name, place = NAMES[which], list(PLACES)[which % len(PLACES)]
    a_animal = f"{_article(animal)} {animal}"
    if rng.random() < 0.1:
        ask = rng.choice(("Tell me a story.", "Tell a story.", "Can you tell me a story?", "Write a short story.", "I want a story.", "Please tell me a story."))
        return Turn(in_passing(rng, ask), story(NAMES[0], "fox", "forest"))
    ask = rng.choice(("Tell me a story about {}.", "Tell a story about {}.", "Write a story about {}.", "A story about {}, please.", "Write a short story about {}."))
    return Turn(in_passing(rng, ask.format(a_animal)), story(name, animal, place))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def tell(rng: Random, longest: int = 8) -> Turn:
    """Ask for a story, whole or in parts."""
    name, animal, place = any_name(rng), rng.choice(tuple(ANIMALS)), rng.choice(tuple(PLACES))
    if rng.random() < 0.15:
        animal = _anything(rng)
    if rng.random() < 0.12:
        place = rng.choice(OBJECTS) if rng.random() < 0.7 else made_up(rng, 2)
    parts = rng.randint(2, longest) if rng.random() < 0.35 else None
    a_animal = f"{_article(animal)} {animal}"
    if rng.random() < 0.15:
        return _told_by_default(rng, animal)
    ask = rng.choice((
        "Tell {0} about {1} named {2} in the {3}.", "Tell me {0} about {1} called {2} in the {3}.", "Write {0} about {1} named {2} in the {3}.",
        "Tell {0} about {2} the {4} in the {3}.", "I want {0} about {1} called {2} who lives in the {3}.", "Please tell me {0} about {2}, {1} in the {3}.",
    ))  # fmt: skip
    what = "a story" if parts is None else f"a story in {parts} parts"
    if parts is None and rng.random() < 0.4:
        what = rng.choice(("a short story", "a long story"))
    if what == "a long story":
        told = story(name, animal, place, len(EPISODES)).splitlines()
        text = " ".join(line.split(": ", 1)[-1] if line.startswith("Part ") else line for line in told)
    else:
        text = story(name, animal, place, parts)
    question = in_passing(rng, ask.format(what, a_animal, name, place, animal))
    return Turn(re.sub(rf"\b{name.lower()}\b", name, question), text)
