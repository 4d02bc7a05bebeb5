"""The load of recovery.py: streams that repeat their requests, and compare each answer with that without a crash."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from measure import WORDS

from uma_trio.client import Eos, ServerError, Token, open_client
from uma_trio.demo.load import Daemon
from uma_trio.models.packaged import EMBEDDED
from uma_trio.training.skills.documents import ask, make_document

KINDS: Final = ("greedy", "seeded", "choices", "sessions")
TEMPERATURE: Final = 0.7
QUESTIONS: Final = 3
"""Requests, or conversations, that a stream repeats."""
N_CHOICES: Final = 3
TURNS: Final = 4
FACTS: Final = 40
"""Facts in the document of a conversation."""
DOCUMENT_TOKENS: Final = 14 * FACTS
RETRY_S: Final = 0.01
"""Pause after a request that failed."""

ANIMALS: Final = ("a fox", "a bear", "a dog", "a cat", "an owl", "a wolf")
NAMES: Final = ("Ada", "Bo", "Max", "Lily", "Ivo", "Nora", "Otto", "Pia")

Answers = tuple[tuple[str, str], ...]
"""Text and finish reason of each answer to a request."""


@attrs.frozen(eq=False)
class Conversation:
    """Requests that follow one another: one of most kinds, several of a session."""

    turns: Sequence[Mapping[str, Any]]
    """Fields of each request, as in docs/PROTOCOL-REFERENCE.md."""
    is_session: bool = False


# -- what is asked ----------------------------------------------------------------------------------


def streams(model: Path, kinds: Sequence[str], n_streams: int, tokens: int, seed: int) -> list[LoadedStream]:
    """Streams of each kind in turn.

    The embedded model gets questions that it was trained on, so that rounding does not change its answers.
    """
    rng = random.Random(seed)
    texts = _questions(model, rng, tokens)
    loaded = []
    for n, kind in zip(range(n_streams), itertools.cycle(kinds), strict=False):
        plain, drawn = {"temperature": 0.0}, {"temperature": TEMPERATURE, "seed": 100 * n}
        if kind == "sessions":
            conversations = [
                Conversation(_turns(model, rng, tokens, drawn if number % 2 else plain), is_session=True)
                for number in range(QUESTIONS)
            ]
        else:
            fields = {"greedy": plain, "seeded": drawn, "choices": {**drawn, "n": N_CHOICES}}[kind]
            conversations = [Conversation([{**next(texts), "cache_prompt": False, **fields}]) for _ in range(QUESTIONS)]
        loaded.append(LoadedStream(f"{kind} {n}", kind, conversations))
    return loaded


def _questions(model: Path, rng: random.Random, tokens: int) -> Iterator[dict[str, Any]]:
    """Requests without end."""
    if model == EMBEDDED:
        stories = [f"Tell me a story about {animal} named {name}" for animal in ANIMALS for name in NAMES]
        counts = [f"Count from {start} to {start + 60}" for start in range(1, 400, 8)]
        pairs = zip(rng.sample(stories, 48), rng.sample(counts, 48), strict=True)
        for text in itertools.cycle([text for pair in pairs for text in pair]):
            yield {"messages": _user(text), "max_tokens": tokens}
    while True:
        yield {"prompt": _words(rng, 64), "max_tokens": tokens, "ignore_eos": True}


def _turns(model: Path, rng: random.Random, tokens: int, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a conversation: a document and a question about it, then other questions, short and long."""
    if model != EMBEDDED:
        sizes = (256, *[32] * (TURNS - 1))
        return [{"prompt": _words(rng, n), "max_tokens": tokens, "ignore_eos": True, **fields} for n in sizes]
    document = make_document(rng.randrange(1 << 30), FACTS)
    asked = []
    for turn in range(TURNS):
        start = rng.randrange(1, 400)
        text = f"Count from {start} to {start + 40}" if turn % 2 else rng.choice(document.facts).question
        asked.append(ask(document, text) if turn == 0 else text)
    return [{"messages": _user(text), "max_tokens": tokens, **fields} for text in asked]


def context(tokens: int) -> int:
    """Tokens of context of the longest conversation."""
    return -(-(max(DOCUMENT_TOKENS, 4 * 256) + TURNS * (4 * 32 + tokens)) // 256) * 256


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


# -- who asks ---------------------------------------------------------------------------------------


@attrs.define
class LoadedStream:
    """A client that repeats its conversations until ``stopping`` is set, and checks every answer."""

    name: str
    kind: str
    conversations: Sequence[Conversation]
    expected: dict[Conversation, list[Answers]] = attrs.field(factory=dict)
    """The answers to each turn without a crash."""
    stopping: bool = False
    last_token_s: float = 0.0
    answers: int = 0
    wrong: list[str] = attrs.field(factory=list)
    """Differences between answers and the expected ones."""
    lost: list[str] = attrs.field(factory=list)
    """Error codes of requests that failed."""
    unstable: int = 0
    """Conversations that are left out, since their answers differ without a crash."""
    _names: Iterator[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._names = (f"{self.name}, conversation {n}" for n in itertools.count(1))

    @property
    def n_sequences(self) -> int:
        """Sequences that a request of this stream takes."""
        return N_CHOICES if self.kind == "choices" else 1

    async def learn(self, daemon: Daemon) -> None:
        """Record the answers of each conversation."""
        for conversation in self.conversations:
            self.expected[conversation] = await self._alone(daemon, conversation)

    async def drop_unstable(self, daemon: Daemon) -> None:
        """Ask once more, next to the other streams, and drop the conversations with other answers.

        The logits depend in their last bits on the other sequences of a batch, which matters to models whose best tokens
        are almost equally likely.
        """
        stable = [
            conversation
            for conversation in self.conversations
            if await self._alone(daemon, conversation) == self.expected[conversation]
        ]
        self.unstable = len(self.conversations) - len(stable)
        if not stable:
            raise click.ClickException(
                f"all answers of a stream depend on the batch, so there is nothing to compare with: leave {self.kind} "
                "out of --kinds, or take another --seed"
            )
        self.conversations = stable

    async def run(self, daemon: Daemon) -> None:
        """Ask until ``stopping`` is set; the answer of that moment is completed and checked too."""
        while not self.stopping:
            await self._round(daemon)

    async def _round(self, daemon: Daemon) -> None:
        """Go through all conversations, turn by turn: while one has its turn, the others may be swapped out."""
        running = {conversation: next(self._names) for conversation in self.conversations}
        begun = set()
        for turn in range(max(len(conversation.turns) for conversation in self.conversations)):
            for conversation, name in [*running.items()]:
                if self.stopping or turn >= len(conversation.turns):
                    continue
                try:
                    answers = await self._ask(daemon, conversation, turn, name)
                except ServerError as error:
                    self.lost.append(str(error.code))
                    del running[conversation]
                    await trio.sleep(RETRY_S)
                    continue
                begun.add(name)
                self.answers += len(answers)
                expected = self.expected[conversation][turn]
                if answers != expected:  # later turns would be wrong for that reason alone
                    self.wrong.append(f"{name}, turn {turn + 1}, {_difference(expected, answers)}")
                    del running[conversation]
        if any(conversation.is_session for conversation in self.conversations):
            for name in begun:
                await _close(daemon, name)

    async def _alone(self, daemon: Daemon, conversation: Conversation) -> list[Answers]:
        name = next(self._names)
        answers = [await self._ask(daemon, conversation, turn, name) for turn in range(len(conversation.turns))]
        if conversation.is_session:
            await _close(daemon, name)
        return answers

    async def _ask(self, daemon: Daemon, conversation: Conversation, turn: int, name: str) -> Answers:
        fields = dict(conversation.turns[turn])
        if conversation.is_session:
            fields["session_id"] = name
        texts, reasons = [""] * self.n_sequences, [""] * self.n_sequences
        async with open_client(daemon.path) as client:
            async for event in client.generate(**fields):
                if isinstance(event, Token):
                    self.last_token_s = trio.current_time()
                    texts[event.index or 0] += event.text
                elif isinstance(event, Eos):
                    reasons[event.index or 0] = event.reason
        return tuple(zip(texts, reasons, strict=True))


async def _close(daemon: Daemon, session: str) -> None:
    async with open_client(daemon.path) as client:
        await client.sessions("close", session_id=session)


def _difference(expected: Answers, received: Answers) -> str:
    index = next(n for n, (one, other) in enumerate(zip(expected, received, strict=True)) if one != other)
    (was, reason), (text, now) = expected[index], received[index]
    at = next((n for n, (a, b) in enumerate(zip(was, text, strict=False)) if a != b), min(len(was), len(text)))
    return f"answer {index}, character {at}: {text[at : at + 40]!r} ({now}) instead of {was[at : at + 40]!r} ({reason})"
