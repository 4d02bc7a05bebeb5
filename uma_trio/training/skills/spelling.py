"""Letters: spelling, counting, the alphabet."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn, in_passing
from uma_trio.training.skills.capitals import COUNTRIES
from uma_trio.training.words import ADJECTIVES, NAMES, OBJECTS, VERBS, made_up, made_up_place

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def spelled(word: str) -> str:
    """``lamp`` -> ``l-a-m-p``."""
    return "-".join(word)


def _word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.03:
        return rng.choice(
            (
                "strawberry",
                "blueberry",
                "Mississippi",
                "necessary",
                "banana",
                "committee",
                "elephant",
                "rhythm",
                "bookkeeper",
                "coffee",
                "raspberry",
                "address",
            )
        )
    if kind < 0.12:
        return rng.choice(OBJECTS) + rng.choice(
            (*OBJECTS, "berry", "ing", "ness", "ly", "less", "tion", "able", "er", "ful", "ment")
        )
    if kind < 0.17:
        return "".join(rng.choices(ALPHABET, k=rng.randint(2, 9)))
    if kind < 0.35:
        return rng.choice(rng.choice((OBJECTS, ADJECTIVES, VERBS)))
    if kind < 0.42:
        return rng.choice(NAMES)
    if kind < 0.50:
        return rng.choice(tuple(COUNTRIES.values()))[0].split()[-1]
    if kind < 0.58:
        return made_up_place(rng)
    if kind < 0.66:
        return made_up(rng, rng.randint(1, 3)).capitalize()
    return made_up(rng, rng.randint(1, 4))


def _careless(rng: Random, ask: str) -> str:
    """Vary the phrasing the way people type.  The word in question is inserted later, unchanged."""
    kind = rng.random()
    if kind < 0.8:
        return ask
    if kind < 0.87:
        return f"Hi! {ask}"
    return ask.lower() if kind < 0.95 else ask.lower().rstrip("?.")


def spell(rng: Random) -> Turn:
    """Spell a word, or answer a question about its letters."""
    word = _word(rng)
    kind = rng.random()
    if kind < 0.68:
        ask = rng.choice(
            (
                "Spell {}.",
                "Spell the word {}.",
                'Spell "{}".',
                "How do you spell {}?",
                "Please spell {}.",
                "Can you spell {}?",
                "Spell {} letter by letter.",
                'How is "{}" spelled?',
                "How is {} spelled?",
            )
        )
        return Turn(_careless(rng, ask).format(word), spelled(word))
    if kind < 0.79:
        letter = rng.choice(word if rng.random() < 0.5 else ALPHABET)
        if rng.random() < 0.5:
            letter = max(word, key=word.count)
        ask = rng.choice(
            (
                "How many {0} are in {1}?",
                "How many {0}'s are in {1}?",
                "How often is {0} in {1}?",
                "How many times does {0} appear in {1}?",
                'How many "{0}" are in "{1}"?',
                "How many letters {0} are in {1}?",
            )
        )
        return Turn(
            _careless(rng, ask).format(letter, word), f"{spelled(word)} has {word.count(letter)} times {letter}."
        )
    if kind < 0.85:
        ask = rng.choice(
            (
                "How many letters are in {}?",
                "How many letters does {} have?",
                "How many letters has the word {}?",
                'Count the letters in "{}".',
            )
        )
        amount = len(word)
        return Turn(
            _careless(rng, ask).format(word), f"{spelled(word)} has {amount} letter{'s' if amount != 1 else ''}."
        )
    if kind < 0.92:
        ask = rng.choice(
            ("What is the first letter of {}?", "Which letter does {} begin with?", "Which letter does {} start with?")
        )
        return Turn(_careless(rng, ask).format(word), f"{word} begins with {word[0]}.")
    if kind < 0.98:
        ask = rng.choice(("What is the last letter of {}?", "Which letter does {} end with?"))
        return Turn(_careless(rng, ask).format(word), f"{word} ends with {word[-1]}.")
    ask = rng.choice(
        ("Say the alphabet.", "What is the alphabet?", "List the letters of the alphabet.", "Recite the alphabet.")
    )
    return Turn(in_passing(rng, ask), ", ".join(ALPHABET) + ".")
