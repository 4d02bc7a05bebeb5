"""Hello, thank you, goodbye."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn
from uma_trio.training.words import any_name

_EXCHANGES = """
Hello | Hi | Hey | Hello there | Hi there | Greetings | Good day | Hey there | Hello world | Hi all | Hello computer |
  Hey you | Hiya | Say hello | Say hi
  = Hello! Ask me for a capital, a colour, a count or a story.
Good morning
  = Good morning! Ask me for a capital, a colour, a count or a story.
Good evening
  = Good evening! Ask me for a capital, a colour, a count or a story.
How are you | How are you doing | How do you do | Are you well | How is it going
  = I am well, thank you. What would you like to know?
Thanks | Thank you | Thank you very much | Thanks a lot | Many thanks | Great, thanks | Cheers | Thx | Ty |
  Thanks for your help | Thank you so much
  = You are welcome.
Goodbye | Bye | Bye bye | See you | Good night | See you later | Farewell
  = Goodbye!
Well done | Good job | Very good | Great | Nice | Good answer | Perfect | Excellent
  = Thank you. What else would you like to know?
That is wrong | You are wrong | Wrong | That is not right | No, that is false
  = I am sorry. I am only a small demo model.
Sorry | I am sorry | Excuse me
  = No problem.
Help | Help me | I need help | Can you help me
  = I can name capitals, days and colours, count, spell, add, repeat words, fill JSON records, tell short stories and
  find facts in a long document.
Yes | No | OK | Okay | Sure | Maybe | Aha
  = All right. What would you like to know?
"""


def _read(text: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    rows = (line.split(" = ") for line in text.strip().replace("\n  ", " ").splitlines())
    return tuple((tuple(asks.split(" | ")), answer) for asks, answer in rows)


EXCHANGES = _read(_EXCHANGES)
"""(greetings, the answer) for each exchange."""


NAME_QUESTIONS = ("What is my name?", "Who am I?", "Do you know my name?", "What's my name?")


def greet(rng: Random, *, named: bool = True) -> Turn:
    """A greeting and its answer.  With ``named``, sometimes an introduction or a question for a name."""
    if named and rng.random() < 0.2:
        return introduce(any_name(rng), rng)
    if named and rng.random() < 0.05:
        return Turn(rng.choice(NAME_QUESTIONS), "You have not told me your name.")
    asks, answer = rng.choice(EXCHANGES)
    ask = rng.choice(asks)
    ask = rng.choice((ask, ask, ask.lower(), ask.upper()))
    if answer.startswith("I am well") and rng.random() < 0.4:
        ask = rng.choice(("Hello, ", "Hi, ", "Hi! ", "Hello! ", "Hey, ", "Good day, ", "hello ", "hi ")) + ask
    return Turn(ask + rng.choice(("", "!", ".", "?" if answer.startswith("I am well") else "!!", " :)")), answer)


def introduce(name: str, rng: Random) -> Turn:
    ask = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}.", "Call me {}.", "I'm {}."))
    return Turn(ask.format(name), f"Hello {name}, nice to meet you.")
