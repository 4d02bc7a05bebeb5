"""Repeat words: in order, in reverse, or one of them."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn
from uma_trio.training.skills.calendar import ORDINALS, in_words
from uma_trio.training.words import accented, any_word, sentence

_REPEAT = (
    "Repeat: {}",
    "Repeat these words: {}",
    "Repeat after me: {}",
    "Say this again: {}",
    "Repeat the following: {}",
    "Echo: {}",
    "Please repeat: {}",
    "Copy this: {}",
    "Say: {}",
    'Say "{}".',
    'Repeat "{}".',
    "repeat: {}",
    "repeat after me: {}",
)


def any_words(rng: Random, longest: int) -> list[str]:
    amount = rng.randint(1, 12) if rng.random() < 0.7 else rng.randint(2, longest)
    kind = rng.random()
    if kind > 0.85:
        return sentence(rng, amount).split()
    if kind < 0.1:
        return [accented(rng) for _ in range(min(amount, 24))]
    words = [any_word(rng) for _ in range(amount)]
    if kind < 0.3:  # a sentence
        words[0] = words[0].capitalize()
        words[-1] += rng.choice(".!")
        if amount > 4:
            words[amount // 2] += ","
    elif kind < 0.4:
        words = [word + "," for word in words[:-1]] + words[-1:]
    return words


def repeat(rng: Random, longest: int = 40) -> Turn:
    """Repeat a list of arbitrary words."""
    text = " ".join(any_words(rng, longest))
    return Turn(rng.choice(_REPEAT).format(text), text)


def pick(rng: Random) -> Turn:
    """Repeat one word, reverse the words, pick one by position, or put each on a line."""
    words = [any_word(rng) for _ in range(rng.randint(2, 10))]
    text = " ".join(words)
    kind = rng.random()
    if kind < 0.08:
        times = rng.randint(2, 10)
        ask = rng.choice(("Repeat the word {} {} times.", "Say {} {} times.", "Say the word {} {} times."))
        return Turn(
            ask.format(words[0], in_words(times) if rng.random() < 0.5 else times), " ".join([words[0]] * times)
        )
    if kind < 0.4:
        ask = rng.choice(
            (
                "Say these words in reverse order: {}",
                "Reverse the order of these words: {}",
                "Say these words backwards: {}",
            )
        )
        return Turn(ask.format(text), " ".join(reversed(words)))
    if kind < 0.6:
        at = rng.randrange(min(len(words), 5))
        ask = rng.choice(
            ("What is the {0} word of: {1}", "Which word is the {0} one here: {1}", "Say only the {0} word of: {1}")
        )
        return Turn(ask.format(ORDINALS[at], text), words[at])
    if kind < 0.8:
        ask = rng.choice(("What is the last word of: {}", "Say only the last word of: {}"))
        return Turn(ask.format(text), words[-1])
    ask = rng.choice(
        (
            "Say these words on separate lines: {}",
            "Put these words on separate lines: {}",
            "Write one word per line: {}",
        )
    )
    return Turn(ask.format(text), "\n".join(words))
