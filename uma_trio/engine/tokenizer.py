"""Text to tokens and tokens to text, with a loaded model's vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

import llama_abi
from llama_abi import TokenAttr
from uma_trio.engine.alignment import Spelling, align
from uma_trio.engine.records import Part, TokenIds

NAMED = TokenAttr.CONTROL | TokenAttr.UNKNOWN
"""Tokens with a meaning instead of a text; found in a text only where ``parse_special`` says so."""

_OPENING: Final = (b"<|", "<｜".encode())
_CLOSING: Final = (b"|>", "｜>".encode())

ALOOF: Final = "\ue000"
"""A character for private use, with which no vocabulary merges anything."""


class NoSuchToken(ValueError):
    """Not the id of a token of this vocabulary."""


@attrs.frozen(eq=False)
class Encoding:
    """A text as tokens, and where in it they stand."""

    ids: TokenIds
    """Shape ``[n]``."""
    offsets: npt.NDArray[np.int64] | None
    """Shape ``[n, 2]``: the range [start, end) of the text's UTF-8 bytes that each token stands for; empty
    for what the text does not have, such as BOS.  A range may begin and end inside a character.  They
    ascend, and cover the text but for white space that a control token takes away.  ``None`` where the
    vocabulary normalises the text, and tokens cannot be traced back to its bytes."""


class Tokenizer:
    """A model's vocabulary.

    Reads only what never changes after loading, so any thread may call it, also while the engine
    computes.  Of no use after the model is closed.
    """

    def __init__(self, vocab: llama_abi.Vocab) -> None:
        self._vocab = vocab
        self._pieces = vocab.tokens_to_bytes(special=False)
        self._spellings: dict[tuple[int, bool], Spelling] = {}
        self.n_tokens = vocab.n_tokens
        """Ids are in ``[0, n_tokens)``."""
        self.bos = "" if vocab.bos is None else self._spelled(vocab.bos).decode("utf-8", "replace")
        self.eos = "" if vocab.eos is None else self._spelled(vocab.eos).decode("utf-8", "replace")

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, continues: bool = False
    ) -> TokenIds:
        """Token ids of a prompt, shape ``[n]``, int32.

        Args:
            add_special: put the model's begin-of-sequence token in front, and whatever else it wants
                around a text; not where the text spells that token itself and ``parse_special`` reads it.
            parse_special: take control tokens spelled out in the text for what they spell.  Without
                it they are letters like others: for text that somebody else wrote.
            continues: other tokens stand before it, so nothing is put in front: neither what
                ``add_special`` means nor the space of a SentencePiece vocabulary.

        Raises:
            llama_abi.LlamaError: a lone surrogate, which UTF-8 cannot say.

        Blocks for about 1 ms for each 10 kB.
        """
        if continues:
            return self._encode_behind(text, parse_special=parse_special)
        add_special = add_special and not (parse_special and self._starts_itself(text))
        ids: TokenIds = self._vocab.tokenize(text, add_special=add_special, parse_special=parse_special)
        return ids

    def encode_parts(self, parts: Sequence[Part], *, continues: bool = False) -> TokenIds:
        """Token ids of a prompt that is not all read alike; of a single part as ``encode`` has them.

        What the model wants around a text stands around the whole, and a part behind another one has a space
        put in front only where that would be so in one text: behind a control token.

        Args:
            parts: one after another they are the prompt; none but a single one is empty.
            continues: as in ``encode``.

        Raises:
            llama_abi.LlamaError: as ``encode``.
        """
        if len(parts) == 1:
            [part] = parts
            return self.encode(part.text, parse_special=part.parse_special, continues=continues)
        found: list[TokenIds] = []
        behind = continues
        for part in parts:
            ids = self.encode(part.text, add_special=False, parse_special=part.parse_special, continues=behind)
            found.append(ids)
            behind = not (len(ids) and self._spelling(int(ids[-1]), part.parse_special).cut_out)
        if not continues and not (parts and parts[0].parse_special and self._starts_itself(parts[0].text)):
            before, after = self._put_around
            found = [before, *found, after]
        return np.concatenate([np.empty(0, np.int32), *found])

    def encode_with_offsets(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Encoding:
        """As ``encode``, and where in the text the tokens stand.

        Blocks for about 10 ms for each 10 kB.
        """
        ids = self.encode(text, add_special=add_special, parse_special=parse_special)
        adds = add_special and not (parse_special and self._starts_itself(text))
        before, after = map(len, self._put_around) if adds else (0, 0)
        body = ids[before : len(ids) - after]
        if not parse_special and self._has_unknown(body):
            return Encoding(ids, None)
        utf8 = text.encode()
        spellings = (self._spelling(token, parse_special) for token in body.tolist())
        ranges = align(utf8, spellings, space_prefix=self._space_prefix)
        if ranges is None:
            return Encoding(ids, None)
        ranges = [(0, 0)] * before + ranges + [(len(utf8), len(utf8))] * after
        return Encoding(ids, np.array(ranges, np.int64).reshape(-1, 2))

    def decode(self, tokens: TokenIds | Iterable[int], *, special: bool = False) -> str:
        """The text of ``tokens``; what is not UTF-8 becomes U+FFFD.

        Undoes ``encode``: the space that a SentencePiece vocabulary puts in front of a text is taken
        away.  Of tokens that go on from others ``piece`` has the bytes as they are.

        Args:
            special: spell control tokens out; else they are left out.

        Raises:
            NoSuchToken: one of them is not in ``[0, n_tokens)``.
        """
        parts = []
        prefixed = self._space_prefix
        for token in self._checked(tokens):
            piece = self._spelled(token) if special else self._pieces[token]
            if self._spelling(token, parse_special=True).cut_out:
                prefixed = self._space_prefix
            elif prefixed:
                piece, prefixed = piece.removeprefix(b" "), False
            parts.append(piece)
        return b"".join(parts).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; a control token stands for none.

        Raises:
            NoSuchToken: it is not in ``[0, n_tokens)``.
        """
        if not 0 <= token < self.n_tokens:
            raise NoSuchToken(f"token {token} is not in [0, {self.n_tokens})")
        return self._pieces[token]

    def pieces_of(self, tokens: TokenIds | Iterable[int]) -> list[bytes]:
        """The bytes of each of ``tokens``, control tokens spelled out.

        Raises:
            NoSuchToken: as ``decode``.
        """
        return [self._spelled(token) for token in self._checked(tokens)]

    @cached_property
    def controls(self) -> frozenset[str]:
        """Texts of the tokens that are found in a text only where ``parse_special`` says so.

        Without those that are no UTF-8, for no text spells them.
        """
        return self._texts((token for token, piece in enumerate(self._pieces) if not piece), NAMED)

    @cached_property
    def markers(self) -> frozenset[str]:
        """Texts of user-defined tokens that are made like control tokens, as ``<|USER_TOKEN|>``.

        They are found in every text.  The models' authors forgot to mark them, and older files (of Command R,
        say) have turns begin with them; llama.cpp's converter goes by their look too.  Other user-defined tokens
        are text that is always one token: runs of spaces, ``</think>``.
        """
        looks = (
            token for token, piece in enumerate(self._pieces) if piece.startswith(_OPENING) and piece.endswith(_CLOSING)
        )
        return self._texts(looks, TokenAttr.USER_DEFINED) - self.controls

    def _texts(self, tokens: Iterable[int], kind: TokenAttr) -> frozenset[str]:
        found = set()
        for token in tokens:
            if self._vocab.attributes(token) & kind and (text := self._spelled(token)):
                with contextlib.suppress(UnicodeDecodeError):
                    found.add(text.decode())
        return frozenset(found)

    @cached_property
    def _put_around(self) -> tuple[TokenIds, TokenIds]:
        """The tokens that ``add_special`` puts before a text and after it, asked of an empty one."""
        added: TokenIds = self._vocab.tokenize("", add_special=True, parse_special=False)
        before = min(len(added), 1) if len(added) == 2 or self._vocab.add_bos else 0
        return added[:before], added[before:]

    @cached_property
    def _space_prefix(self) -> bool:
        """The vocabulary puts a space before a text, asked of a letter."""
        letter = self._vocab.tokenize("a", add_special=False, parse_special=False)
        return b"".join(self.pieces_of(letter)) == b" a"

    def _encode_behind(self, text: str, *, parse_special: bool) -> TokenIds:
        """The tokens of ``text`` without a space in front: behind a character that is taken off again."""
        ahead = self._ahead
        ids: TokenIds = self._vocab.tokenize(
            ALOOF + text if len(ahead) else text, add_special=False, parse_special=parse_special
        )
        if not np.array_equal(ids[: len(ahead)], ahead):  # some vocabulary does merge it
            return self.encode(text, add_special=False, parse_special=parse_special)
        return ids[len(ahead) :]

    @cached_property
    def _ahead(self) -> TokenIds:
        """What ``ALOOF`` becomes, where it is needed."""
        ids: TokenIds = self._vocab.tokenize(
            ALOOF if self._space_prefix else "", add_special=False, parse_special=False
        )
        return ids

    def _checked(self, tokens: TokenIds | Iterable[int]) -> list[int]:
        found = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        for token in found:
            if not isinstance(token, int) or not 0 <= token < self.n_tokens:
                raise NoSuchToken(f"token {token!r} is not in [0, {self.n_tokens})")
        return found

    def _spelled(self, token: int) -> bytes:
        return self._pieces[token] or self._vocab.token_to_bytes(token, special=True)

    def _starts_itself(self, text: str) -> bool:
        """The text spells the token that it is to begin with."""
        return bool(self.bos) and text.startswith(self.bos)

    def _has_unknown(self, tokens: TokenIds) -> bool:
        """One of them stands for something that the vocabulary has no token for."""
        return any(self._vocab.attributes(token) & TokenAttr.UNKNOWN for token in np.unique(tokens).tolist())

    def _spelling(self, token: int, parse_special: bool) -> Spelling:
        known = self._spellings.get((token, parse_special))
        if known is None:
            kind = self._vocab.attributes(token)
            cut_out = TokenAttr.USER_DEFINED | (NAMED if parse_special else TokenAttr(0))
            known = self._spellings[token, parse_special] = Spelling(
                self._spelled(token),
                cut_out=bool(kind & cut_out),
                strips_left=bool(kind & TokenAttr.LSTRIP),
                strips_right=bool(kind & TokenAttr.RSTRIP),
            )
        return known
