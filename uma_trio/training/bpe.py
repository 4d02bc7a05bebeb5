"""Byte-level BPE: pre-tokenization, learning merges, encoding and decoding.

Splits text as GPT-2 and llama.cpp's ``gpt-2`` pre-tokenizer do.  llama.cpp has a hand-written splitter for it,
without a regular expression that could overflow the stack on hostile text:

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

Two more rules restrict which merges are learned.  No merge contains a digit, so numbers are tokenized digit by digit.
No merge contains a byte beyond ASCII, so each such character is several tokens.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import attrs

from uma_trio.tokenizer.words import BYTE_LETTERS

Pair = tuple[str, str]


_BYTE_OF = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
_MERGEABLE = frozenset(BYTE_LETTERS[byte] for byte in range(128) if not 48 <= byte <= 57)
_SPACES = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def _ranges(category: str) -> str:
    """The inside of a character class with all code points of a Unicode category."""
    ranges, start = [], -1
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == category
        if inside and start < 0:
            start = code
        elif not inside and start >= 0:
            ranges.append(f"\\U{start:08x}-\\U{code - 1:08x}")
            start = -1
    return "".join(ranges)


@functools.cache
def _splitter() -> re.Pattern[str]:
    letter, number = _ranges("L"), _ranges("N")
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{_SPACES}{letter}{number}]+"
        rf"|[{_SPACES}]+(?![^{_SPACES}])|[{_SPACES}]+"
    )


def cut(text: str) -> list[str]:
    """Split ``text`` into pieces that no token crosses.  Joined they are ``text``."""
    return _splitter().findall(text)


def _in_byte_letters(piece: str) -> str:
    return "".join(BYTE_LETTERS[byte] for byte in piece.encode())


def learn(texts: Iterable[str], amount: int) -> list[Pair]:
    """Learn ``amount`` merges: always the most frequent pair, ties broken by spelling.

    Counts distinct pieces, so the time depends on their number and not on the length of ``texts``.
    """
    counts = Counter(piece for text in texts for piece in cut(text))
    words = [(list(_in_byte_letters(piece)), count) for piece, count in sorted(counts.items())]
    pair_counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for at, (symbols, count) in enumerate(words):
        for pair in _pairs(symbols):
            pair_counts[pair] += count
            where[pair].add(at)
    merges: list[Pair] = []
    while len(merges) < amount and pair_counts:
        best = max(pair_counts, key=lambda pair: (pair_counts[pair], pair))
        if pair_counts[best] < 2:
            break
        merges.append(best)
        for at in sorted(where.pop(best)):
            symbols, count = words[at]
            for pair in _pairs(symbols):
                pair_counts[pair] -= count
                if pair_counts[pair] <= 0:
                    del pair_counts[pair]
                where[pair].discard(at)
            merged = _merged(symbols, best)
            words[at] = (merged, count)
            for pair in _pairs(merged):
                pair_counts[pair] += count
                where[pair].add(at)
    return merges


def _pairs(symbols: Sequence[str]) -> list[Pair]:
    return [
        (one, other)
        for one, other in itertools.pairwise(symbols)
        if _MERGEABLE.issuperset(one) and _MERGEABLE.issuperset(other)
    ]


def _merged(symbols: Sequence[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        if tuple(symbols[at : at + 2]) == pair:
            merged.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return merged


@attrs.frozen
class Tokenizer:
    """A vocabulary: control tokens, then the 256 bytes, then one token per merge."""

    controls: tuple[str, ...]
    merges: tuple[Pair, ...]

    @functools.cached_property
    def tokens(self) -> list[str]:
        """Token texts by id, in byte letters; control tokens by name."""
        return [*self.controls, *BYTE_LETTERS, *(one + other for one, other in self.merges)]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {token: at for at, token in enumerate(self.tokens)}

    @functools.cached_property
    def _ranks(self) -> dict[Pair, int]:
        return {pair: rank for rank, pair in enumerate(self.merges)}

    @functools.cached_property
    def _seen(self) -> dict[str, tuple[int, ...]]:
        return {}

    def control(self, name: str) -> int:
        return self.controls.index(name)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text.  Does not parse control tokens."""
        encoded: list[int] = []
        for piece in cut(text):
            ids = self._seen.get(piece)
            if ids is None:
                ids = self._encode_piece(piece)
                if len(self._seen) < 200_000:
                    self._seen[piece] = ids
            encoded.extend(ids)
        return encoded

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        symbols: list[str] = list(_in_byte_letters(piece))
        while len(symbols) > 1:
            ranked = [self._ranks.get(pair, len(self.merges)) for pair in itertools.pairwise(symbols)]
            best = min(ranked)
            if best == len(self.merges):
                break
            symbols = _merged(symbols, self.merges[best])
        return tuple(self._ids[symbol] for symbol in symbols)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without control tokens."""
        letters = "".join(self.tokens[at] for at in ids if at >= len(self.controls))
        return bytes(_BYTE_OF[letter] for letter in letters).decode(errors="replace")
