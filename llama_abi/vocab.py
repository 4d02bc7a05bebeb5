"""Text to tokens and back."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llama_abi.errors import LlamaError, TooManyTokens
from llama_abi.types import MACROS, TOKEN_ATTR, VOCAB_TYPE

if TYPE_CHECKING:
    from llama_abi.model import Model

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
TOKEN_NULL = MACROS["LLAMA_TOKEN_NULL"]

Tokens = npt.NDArray[np.int32]
"""Token ids, one dimension."""


class TokenAttr(enum.IntFlag):
    """What llama.cpp knows of a token; other bits may be set as well."""

    UNKNOWN = TOKEN_ATTR["LLAMA_TOKEN_ATTR_UNKNOWN"]
    """Stands for what the vocabulary has no token for."""
    CONTROL = TOKEN_ATTR["LLAMA_TOKEN_ATTR_CONTROL"]
    USER_DEFINED = TOKEN_ATTR["LLAMA_TOKEN_ATTR_USER_DEFINED"]
    """Text that is always this token, whatever ``parse_special`` says."""
    LSTRIP = TOKEN_ATTR["LLAMA_TOKEN_ATTR_LSTRIP"]
    """Takes the white space before it away."""
    RSTRIP = TOKEN_ATTR["LLAMA_TOKEN_ATTR_RSTRIP"]
    """Takes the white space after it away."""


class Vocab:
    """The vocabulary of an open model; safe to use from any thread.

    Every method raises ``Closed`` once the model is closed, and ``LlamaError`` for a token id that
    is not in ``[0, n_tokens)``: llama.cpp itself would end the process.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._c = model.library.c
        self._vocab = self._c.llama_model_get_vocab(model._pointer)
        self.n_tokens = int(self._c.llama_vocab_n_tokens(self._vocab))
        """Ids are in ``[0, n_tokens)``; also the width of a row of logits."""
        self.has_tokenizer = self._c.llama_vocab_type(self._vocab) != VOCAB_TYPE["LLAMA_VOCAB_TYPE_NONE"]
        """A file without one can be decoded, in token ids only."""

    @property
    def _pointer(self) -> Any:
        self._model._pointer  # noqa: B018  raises Closed
        return self._vocab

    @cached_property
    def bos(self) -> int | None:
        """Beginning of text."""
        return self._special(self._c.llama_vocab_bos)

    @cached_property
    def eos(self) -> int | None:
        """End of text."""
        return self._special(self._c.llama_vocab_eos)

    @cached_property
    def eot(self) -> int | None:
        """End of a turn in a chat."""
        return self._special(self._c.llama_vocab_eot)

    @cached_property
    def add_bos(self) -> bool:
        """The model expects its texts to start with ``bos``; ``add_special`` then adds it."""
        return bool(self._c.llama_vocab_get_add_bos(self._pointer))

    @cached_property
    def add_eos(self) -> bool:
        """``add_special`` appends ``eos``."""
        return bool(self._c.llama_vocab_get_add_eos(self._pointer))

    @cached_property
    def eog_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation, ascending."""
        pointer = self._pointer
        return tuple(t for t in range(self.n_tokens) if self._c.llama_vocab_is_eog(pointer, t))

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""
        return bool(self._c.llama_vocab_is_eog(self._pointer, self._checked(token)))

    def is_control(self, token: int) -> bool:
        """Whether ``token`` has a meaning instead of a text."""
        return bool(self._c.llama_vocab_is_control(self._pointer, self._checked(token)))

    def attributes(self, token: int) -> TokenAttr:
        """What kind of token ``token`` is."""
        return TokenAttr(self._c.llama_vocab_get_attr(self._pointer, self._checked(token)))

    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool,
        parse_special: bool,
        limit: int | None = None,
    ) -> Tokens:
        """The tokens of ``text``.

        Args:
            text: UTF-8 when bytes; NUL characters are text like any other, and bytes that are not
                UTF-8 become replacement characters.
            add_special: put ``bos`` and the like where the model expects them.
            parse_special: read the spelling of special tokens as these tokens.  Never for text
                that somebody else wrote.
            limit: most tokens allowed; no array larger than that is made.

        Returns:
            int32 ``[n]``, the caller's own.

        Raises:
            TooManyTokens: more than ``limit``.
            LlamaError: the model has no tokenizer, a lone surrogate in ``text``, or more bytes or
                tokens than an int32 counts.

        Blocks without the GIL; about 1 us a token, more for one very long word.
        Source: llama.h, ``llama_tokenize``.
        """
        pointer = self._pointer
        self._need_tokenizer()
        if isinstance(text, str):
            try:
                text = text.encode()
            except UnicodeEncodeError as error:
                raise LlamaError(f"the text is not Unicode: {error}") from None
        if len(text) > INT32_MAX:
            raise LlamaError(f"a text of {len(text)} bytes is too long")
        # Nearly always at most one token a byte, and a few in front; if not, ask a second time.
        room = len(text) + 8 if limit is None else min(len(text) + 8, max(limit, 0))
        while True:
            tokens = np.empty(min(room, INT32_MAX), np.int32)
            n = self._c.llama_tokenize(
                pointer, text, len(text), _int32s(tokens), len(tokens), add_special, parse_special
            )
            if n == INT32_MIN:
                raise LlamaError("the text has more tokens than an int32 counts", code=n)
            if limit is not None and abs(n) > limit:
                raise TooManyTokens(abs(n), limit)
            if n >= 0:
                return tokens[:n].copy() if n < len(tokens) // 2 else tokens[:n]
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that ``token`` stands for; one token may be a part of a character.

        With ``special`` control tokens are spelled out; without, they are empty.
        """
        self._need_tokenizer()
        return self._piece(self._pointer, self._checked(token), special, ctypes.create_string_buffer(64))

    def pieces(self, *, special: bool = False) -> list[bytes]:
        """``piece`` of every token, by id.  About 10 ms for each 10,000 tokens: keep it."""
        pointer, buffer = self._pointer, ctypes.create_string_buffer(256)
        self._need_tokenizer()
        return [self._piece(pointer, token, special, buffer) for token in range(self.n_tokens)]

    def _piece(self, pointer: Any, token: int, special: bool, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        n = self._c.llama_token_to_piece(pointer, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._c.llama_token_to_piece(pointer, token, buffer, -n, 0, special)
        return ctypes.string_at(buffer, n)

    def detokenize(self, tokens: Iterable[int] | Tokens, *, special: bool = False) -> bytes:
        """The text of ``tokens``, with llama.cpp's clean-ups (a leading space may go).

        For a stream use ``piece``: its concatenation grows by appending only.
        """
        pointer = self._pointer
        self._need_tokenizer()
        ids = np.ascontiguousarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int32)
        if ids.ndim != 1:
            raise LlamaError(f"tokens must have one dimension, not {ids.ndim}")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.n_tokens:
            raise LlamaError(f"a token id is not in [0, {self.n_tokens})")
        size = 8 * len(ids) + 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._c.llama_detokenize(pointer, _int32s(ids), len(ids), buffer, size, False, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def token_to_id(self, spelling: str | bytes) -> int | None:
        """The one token that ``spelling`` is, special ones included; ``None`` when it takes several."""
        wanted = spelling.encode() if isinstance(spelling, str) else spelling
        found = self.tokenize(wanted, add_special=False, parse_special=True)
        if len(found) == 1 and self.piece(int(found[0]), special=True) == wanted:
            return int(found[0])
        return None

    def _special(self, function: Any) -> int | None:
        token = int(function(self._pointer))
        return None if token == TOKEN_NULL else token

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_tokens:
            raise LlamaError(f"token {token} is not in [0, {self.n_tokens})")
        return token

    def _need_tokenizer(self) -> None:
        if not self.has_tokenizer:
            raise LlamaError("this model has no tokenizer")


def _int32s(array: Tokens) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_int32))
