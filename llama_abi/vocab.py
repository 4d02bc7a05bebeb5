"""The vocabulary of a model: text to tokens and back."""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llama_abi.errors import LlamaError, TooManyTokens
from llama_abi.handles import Handle
from llama_abi.types import MACROS, TOKEN_ATTR, VOCAB_TYPE

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
TOKEN_NULL = MACROS["LLAMA_TOKEN_NULL"]

Tokens = npt.NDArray[np.int32]
"""Token ids, shape ``[n]``."""


class TokenAttr(enum.IntFlag):
    """Attributes of a token. llama.cpp may set other bits too."""

    UNKNOWN = TOKEN_ATTR["LLAMA_TOKEN_ATTR_UNKNOWN"]
    """Replaces text that the vocabulary has no token for."""
    CONTROL = TOKEN_ATTR["LLAMA_TOKEN_ATTR_CONTROL"]
    """Has a meaning instead of a text."""
    USER_DEFINED = TOKEN_ATTR["LLAMA_TOKEN_ATTR_USER_DEFINED"]
    """Its text always becomes this token, whatever ``parse_special`` is."""
    LSTRIP = TOKEN_ATTR["LLAMA_TOKEN_ATTR_LSTRIP"]
    """Removes the white space before it."""
    RSTRIP = TOKEN_ATTR["LLAMA_TOKEN_ATTR_RSTRIP"]
    """Removes the white space after it."""


@attrs.frozen(kw_only=True)
class FimTokens:
    """Tokens that mark a gap in a text, and what stands around it."""

    prefix: int
    """Stands before the text before the gap."""
    suffix: int
    """Stands before the text after the gap."""
    middle: int
    """Stands before the text that fills the gap."""
    repository: int | None
    """Stands before the name of a repository."""
    file: int | None
    """Stands before the name of each file."""


class Vocab:
    """The vocabulary of an open model. Any thread may use it, also while another one closes the model.

    Every method raises ``HandleClosed`` once the model is closed, and ``LlamaError`` for a token id outside
    ``[0, n_tokens)``, which would abort the process in llama.cpp.
    """

    def __init__(self, c: Any, model: Handle) -> None:
        self._model = model
        self._c = c
        self._vocab = self._c.llama_model_get_vocab(model._pointer)
        self.n_tokens = int(self._c.llama_vocab_n_tokens(self._vocab))
        """Number of tokens, and width of a row of logits. Ids are in ``[0, n_tokens)``."""
        self.has_tokenizer = self._c.llama_vocab_type(self._vocab) != VOCAB_TYPE["LLAMA_VOCAB_TYPE_NONE"]
        """Whether the file has a tokenizer. Without one a model takes and returns token ids only."""

    @property
    def _pointer(self) -> Any:
        self._model._pointer  # noqa: B018  raises HandleClosed
        return self._vocab

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[Any]:
        """The C object, which is not freed before the end of the context."""
        with self._model._kept_open():
            yield self._vocab

    @cached_property
    def bos(self) -> int | None:
        """Token for the beginning of a text."""
        return self._special(self._c.llama_vocab_bos)

    @cached_property
    def eos(self) -> int | None:
        """Token for the end of a text."""
        return self._special(self._c.llama_vocab_eos)

    @cached_property
    def eot(self) -> int | None:
        """Token for the end of a turn in a chat."""
        return self._special(self._c.llama_vocab_eot)

    @cached_property
    def add_bos(self) -> bool:
        """Whether ``add_special`` puts ``bos`` before a text."""
        with self._in_use() as pointer:
            return bool(self._c.llama_vocab_get_add_bos(pointer))

    @cached_property
    def add_eos(self) -> bool:
        """Whether ``add_special`` puts ``eos`` after a text."""
        with self._in_use() as pointer:
            return bool(self._c.llama_vocab_get_add_eos(pointer))

    @cached_property
    def fim(self) -> FimTokens | None:
        """Tokens for filling in the middle of a text; ``None`` if the vocabulary has none."""
        c = self._c
        prefix, suffix, middle = map(
            self._special, (c.llama_vocab_fim_pre, c.llama_vocab_fim_suf, c.llama_vocab_fim_mid)
        )
        if prefix is None or suffix is None or middle is None:
            return None
        repository, file = map(self._special, (c.llama_vocab_fim_rep, c.llama_vocab_fim_sep))
        return FimTokens(prefix=prefix, suffix=suffix, middle=middle, repository=repository, file=file)

    @cached_property
    def eog_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation, in ascending order."""
        with self._in_use() as pointer:
            return tuple([t for t in range(self.n_tokens) if self._c.llama_vocab_is_eog(pointer, t)])

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""
        with self._in_use() as pointer:
            return bool(self._c.llama_vocab_is_eog(pointer, self._checked(token)))

    def is_control(self, token: int) -> bool:
        """Whether ``token`` has a meaning instead of a text."""
        with self._in_use() as pointer:
            return bool(self._c.llama_vocab_is_control(pointer, self._checked(token)))

    def attributes(self, token: int) -> TokenAttr:
        """Attributes of ``token``."""
        with self._in_use() as pointer:
            return TokenAttr(self._c.llama_vocab_get_attr(pointer, self._checked(token)))

    def all_attributes(self) -> list[TokenAttr]:
        """Attributes of every token, by id: a hundred times as fast as asking for each."""
        with self._in_use() as pointer:
            attributes = [self._c.llama_vocab_get_attr(pointer, token) for token in range(self.n_tokens)]
        known = {value: TokenAttr(value) for value in {*attributes}}
        return [known[value] for value in attributes]

    def tokenize(
        self,
        text: str | bytes,
        *,
        add_special: bool,
        parse_special: bool,
        limit: int | None = None,
    ) -> Tokens:
        """Split ``text`` into tokens.

        Blocks without the GIL, for about 1 us per token, and longer for one very long word.

        Args:
            text: bytes must be UTF-8; invalid bytes become replacement characters. NUL is a character like any other.
            add_special: add ``bos`` and the like where the model expects them.
            parse_special: turn the spelling of a control token into that token. Never use it for untrusted text.
            limit: most tokens allowed. No larger array is allocated.

        Returns:
            int32 ``[n]``, owned by the caller.

        Raises:
            TooManyTokens: there are more than ``limit``.
            LlamaError: the model has no tokenizer or lacks a token that ``add_special`` needs, ``text`` has a lone
                surrogate, or the number of bytes or tokens exceeds an int32.

        Source: llama.h, ``llama_tokenize``.
        """
        self._need_tokenizer()
        if add_special and ((self.add_bos and self.bos is None) or (self.add_eos and self.eos is None)):
            raise LlamaError("the model adds bos or eos to a text, and its vocabulary has no such token")
        if isinstance(text, str):
            try:
                text = text.encode()
            except UnicodeEncodeError as error:
                raise LlamaError(f"the text is not Unicode: {error}") from None
        if len(text) > INT32_MAX:
            raise LlamaError(f"a text of {len(text)} bytes is too long")
        # Nearly every text has at most one token per byte and a few special ones; otherwise the loop runs again.
        room = len(text) + 8 if limit is None else min(len(text) + 8, max(limit, 0))
        while True:
            tokens = np.empty(min(room, INT32_MAX), np.int32)
            with self._in_use() as pointer:
                n = self._c.llama_tokenize(
                    pointer, text, len(text), _int32s(tokens), len(tokens), add_special, parse_special
                )
            if n == INT32_MIN:
                raise LlamaError("the text has more tokens than an int32 can count", code=n)
            if limit is not None and abs(n) > limit:
                raise TooManyTokens(abs(n), limit)
            if n >= 0:
                return tokens[:n].copy() if n < len(tokens) // 2 else tokens[:n]
            room = -n

    def token_to_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, which may be a part of a character.

        Args:
            special: spell control tokens out; otherwise they are empty.
        """
        self._need_tokenizer()
        with self._in_use() as pointer:
            return self._token_bytes(pointer, self._checked(token), special, ctypes.create_string_buffer(64))

    def tokens_to_bytes(self, *, special: bool = False) -> list[bytes]:
        """The bytes of every token, by id. Takes about 10 ms per 10,000 tokens, so keep the result."""
        self._need_tokenizer()
        buffer = ctypes.create_string_buffer(256)
        with self._in_use() as pointer:
            return [self._token_bytes(pointer, token, special, buffer) for token in range(self.n_tokens)]

    def _token_bytes(self, pointer: Any, token: int, special: bool, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        n = self._c.llama_token_to_piece(pointer, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._c.llama_token_to_piece(pointer, token, buffer, -n, 0, special)
        return ctypes.string_at(buffer, n)

    def detokenize(self, tokens: Iterable[int] | Tokens) -> bytes:
        """The text of ``tokens`` with llama.cpp's clean-ups, which may remove a leading space.

        For a stream use ``token_to_bytes``: appending a token never changes the bytes before it.
        """
        self._need_tokenizer()
        ids = np.ascontiguousarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int32)
        if ids.ndim != 1:
            raise LlamaError(f"tokens must have one dimension, not {ids.ndim}")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.n_tokens:
            raise LlamaError(f"a token id is not in [0, {self.n_tokens})")
        size = 8 * len(ids) + 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            with self._in_use() as pointer:
                n = self._c.llama_detokenize(pointer, _int32s(ids), len(ids), buffer, size, False, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def token_to_id(self, spelling: str | bytes) -> int | None:
        """The token, control tokens included, whose text is ``spelling``; ``None`` if there is no such token."""
        wanted = spelling.encode() if isinstance(spelling, str) else spelling
        tokens = self.tokenize(wanted, add_special=False, parse_special=True)
        if len(tokens) == 1 and self.token_to_bytes(int(tokens[0]), special=True) == wanted:
            return int(tokens[0])
        return None

    def _special(self, function: Any) -> int | None:
        with self._in_use() as pointer:
            token = int(function(pointer))
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
