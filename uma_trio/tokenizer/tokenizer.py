"""Tokenize and detokenize with a loaded model's vocabulary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

import llama_abi
from llama_abi import TokenAttr
from uma_trio.engine_link.messages import LoadError, PromptPart
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.grammar.vocabulary import Vocabulary
from uma_trio.tokenizer.alignment import Spelling, align

CONTROL_ATTRIBUTES = TokenAttr.CONTROL | TokenAttr.UNKNOWN
"""Tokens found in a text only with ``parse_special``."""

_OPENING: Final = (b"<|", "<｜".encode())
_CLOSING: Final = (b"|>", "｜>".encode())

SENTINEL: Final = "\ue000"
"""A private-use character.  No vocabulary merges it with its neighbours."""


TOKENS_BETWEEN_PAUSES: Final = 64
PAUSE_S: Final = 1e-4
"""Long enough for another thread to begin."""


class InvalidTokenId(ValueError):
    """The id is not in ``[0, n_tokens)``."""


@attrs.frozen(eq=False)
class TokenizedText:
    """The tokens of a text and their positions in it."""

    ids: TokenIds
    """Shape ``[n]``."""
    offsets: npt.NDArray[np.int64] | None
    """Shape ``[n, 2]``: for each token the range [start, end) of the text's UTF-8 bytes.

    Empty for tokens that are not in the text, such as BOS.  A range may begin and end inside a character.  Ranges
    ascend and cover the text, except for whitespace that a control token strips.  ``None`` if tokens cannot be traced
    back to bytes, because the vocabulary normalises the text.
    """


class Tokenizer:
    """A model's vocabulary.

    Thread-safe, also while the engine computes: it only reads data that never changes after loading.  Must not be used
    after the model is closed.
    """

    def __init__(self, vocab: llama_abi.Vocab) -> None:
        self._vocab = vocab
        self._bytes = vocab.tokens_to_bytes(special=False)
        self._spellings: dict[tuple[int, bool], Spelling] = {}
        self.n_tokens = vocab.n_tokens
        """Ids are in ``[0, n_tokens)``."""
        self.eos_id = vocab.eos
        self.added_bos_id = vocab.bos if vocab.add_bos else None
        """BOS, if ``add_special`` puts it before a text."""
        self.fim = vocab.fim
        """Tokens for filling in the middle of a text; ``None`` if the vocabulary has none."""
        self.adds_eos = vocab.add_eos
        """Whether ``add_special`` puts EOS after a text."""
        self.bos = "" if vocab.bos is None else self._spelled(vocab.bos).decode("utf-8", "replace")
        self.eos = "" if vocab.eos is None else self._spelled(vocab.eos).decode("utf-8", "replace")

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, continues: bool = False
    ) -> TokenIds:
        """Token ids of a prompt, shape ``[n]``, int32.

        Args:
            add_special: add BOS and the other tokens that the model expects around a text.  No second BOS if the text
                spells it and ``parse_special`` is set.
            parse_special: tokenize control tokens spelled out in the text as control tokens.  Without it they are
                plain text; use that for text from elsewhere.
            continues: the text follows other tokens.  Adds nothing in front: neither BOS nor the space prefix of a
                SentencePiece vocabulary.

        Raises:
            llama_abi.LlamaError: the text has a lone surrogate, which UTF-8 cannot encode.

        Blocks for about 1 ms per 10 kB.
        """
        if continues:
            return self._encode_continuation(text, parse_special=parse_special)
        add_special = add_special and not (parse_special and self._spells_bos(text))
        ids: TokenIds = self._vocab.tokenize(text, add_special=add_special, parse_special=parse_special)
        return ids

    def encode_parts(
        self, parts: Sequence[PromptPart], *, continues: bool = False, add_special: bool = True
    ) -> TokenIds:
        """Token ids of a prompt whose parts differ in ``parse_special``, shape ``[n]``, int32.

        Special tokens stand around all parts together.  A part after another one gets a space prefix only where it
        would get one inside a single text: after a control token.  A single part has the tokens of ``encode``.

        Args:
            parts: joined they are the prompt.  No part is empty, except a single one.
            continues, add_special: as in ``encode``.

        Raises:
            llama_abi.LlamaError: as ``encode``.
        """
        if len(parts) == 1:
            [part] = parts
            return self.encode(
                part.text, add_special=add_special, parse_special=part.parse_special, continues=continues
            )
        ids_of_parts: list[TokenIds] = []
        follows = continues
        for part in parts:
            ids = self.encode(part.text, add_special=False, parse_special=part.parse_special, continues=follows)
            ids_of_parts.append(ids)
            follows = not (len(ids) and self._spelling(int(ids[-1]), part.parse_special).special)
        if add_special and not continues:
            ids_of_parts = self._with_special(parts, ids_of_parts)
        return np.concatenate([np.empty(0, np.int32), *ids_of_parts])

    def encode_around(
        self, texts: Sequence[Sequence[PromptPart]], others: Sequence[TokenIds], *, continues: bool = False
    ) -> tuple[TokenIds, list[int]]:
        """Token ids of texts with other tokens between them, and where the other tokens begin.

        Each text is tokenized by itself, as libmtmd does around pictures.

        Args:
            texts: each as for ``encode_parts``, or empty; one more than ``others``.
            continues: as in ``encode``.
        """
        segments = [np.empty(0, np.int32)]
        for n, text in enumerate(texts):
            if text:
                segments.append(self.encode_parts(text, continues=continues and not n, add_special=False))
            segments += others[n : n + 1]
        if not continues:
            segments = self._with_special(texts[0], segments)
        starts, at = [], 0
        for segment in segments:
            starts += [at] if any(segment is other for other in others) else []
            at += len(segment)
        return np.concatenate(segments), starts

    def _with_special(self, first: Sequence[PromptPart], segments: Sequence[TokenIds]) -> list[TokenIds]:
        """``segments`` with the special tokens around it, unless its text begins with ``first`` and spells them."""
        if first and first[0].parse_special and self._spells_bos(first[0].text):
            return [*segments]
        before, after = self._special_around
        return [before, *segments, after]

    def encode_with_offsets(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, pauses: bool = False
    ) -> TokenizedText:
        """The tokens of ``encode`` with their positions in the text.

        Blocks for about 10 ms per 10 kB.

        Args:
            pauses: in a thread: often let other threads have the interpreter, which would wait 5 ms for it otherwise.
        """
        ids = self.encode(text, add_special=add_special, parse_special=parse_special)
        adds = add_special and not (parse_special and self._spells_bos(text))
        before, after = map(len, self._special_around) if adds else (0, 0)
        body = ids[before : len(ids) - after]
        if not parse_special and self._has_unknown(body):
            return TokenizedText(ids, None)
        utf8 = text.encode()
        spellings: Iterable[Spelling] = (self._spelling(token, parse_special) for token in body.tolist())
        if pauses:
            spellings = _with_pauses(spellings)
        ranges = align(utf8, spellings, space_prefix=self._space_prefix)
        if ranges is None:
            return TokenizedText(ids, None)
        ranges = [(0, 0)] * before + ranges + [(len(utf8), len(utf8))] * after
        return TokenizedText(ids, np.array(ranges, np.int64).reshape(-1, 2))

    def decode(self, tokens: TokenIds | Iterable[int], *, special: bool = False) -> str:
        """The text of ``tokens``.  Bytes that are not UTF-8 become U+FFFD.

        Undoes ``encode``, so it removes the space prefix of a SentencePiece vocabulary.  For tokens that continue a
        text use ``token_to_bytes``, which keeps the space.

        Args:
            special: spell control tokens out.  Otherwise they are omitted.

        Raises:
            InvalidTokenId: an id is not in ``[0, n_tokens)``.
        """
        parts = []
        prefixed = self._space_prefix
        for token in self._checked(tokens):
            spelled = self._spelled(token) if special else self._bytes[token]
            if self._spelling(token, parse_special=True).special:
                prefixed = self._space_prefix
            elif prefixed:
                spelled, prefixed = spelled.removeprefix(b" "), False
            parts.append(spelled)
        return b"".join(parts).decode("utf-8", "replace")

    def token_to_bytes(self, token: int) -> bytes:
        """The bytes of a token.  Empty for a control token.

        Raises:
            InvalidTokenId: the id is not in ``[0, n_tokens)``.
        """
        if not 0 <= token < self.n_tokens:
            raise InvalidTokenId(f"token {token} is not in [0, {self.n_tokens})")
        return self._bytes[token]

    def control_id(self, text: str) -> int | None:
        """The id of the control token that ``text`` spells; ``None`` if it spells none."""
        if text not in self.control_tokens:
            return None
        ids = self.encode(text, add_special=False, continues=True).tolist()
        return ids[0] if len(ids) == 1 else None

    def tokens_to_bytes(self, tokens: TokenIds | Iterable[int]) -> list[bytes]:
        """The bytes of each token, with control tokens spelled out.

        Raises:
            InvalidTokenId: as ``decode``.
        """
        return [self._spelled(token) for token in self._checked(tokens)]

    def whole_tokens(self) -> list[tuple[int, Spelling]]:
        """Tokens that are found in a text before the rest of it is tokenized, with ``parse_special``."""
        kinds = self._vocab.all_attributes()
        special = {kind for kind in {*kinds} if kind & (TokenAttr.USER_DEFINED | CONTROL_ATTRIBUTES)}
        whole = [token for token, kind in enumerate(kinds) if kind in special]
        return [(token, self._spelling(token, parse_special=True)) for token in whole]

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the tokens found in a text only with ``parse_special``.

        Omits texts that are not UTF-8, because no text spells them.
        """
        return self._texts((token for token, spelled in enumerate(self._bytes) if not spelled), CONTROL_ATTRIBUTES)

    @cached_property
    def user_defined_controls(self) -> frozenset[str]:
        """Texts of user-defined tokens that look like control tokens, such as ``<|USER_TOKEN|>``.

        llama.cpp finds user-defined tokens in every text.  Some model files mark their control tokens wrongly as
        user-defined: in older files of Command R, turns begin with them.  llama.cpp's converter also goes by the look.
        Other user-defined tokens are plain text that is always one token: runs of spaces, ``</think>``.
        """
        looks = (
            token
            for token, spelled in enumerate(self._bytes)
            if spelled.startswith(_OPENING) and spelled.endswith(_CLOSING)
        )
        return self._texts(looks, TokenAttr.USER_DEFINED) - self.control_tokens

    def _texts(self, tokens: Iterable[int], kind: TokenAttr) -> frozenset[str]:
        texts = set()
        for token in tokens:
            if self._vocab.attributes(token) & kind and (text := self._spelled(token)):
                with contextlib.suppress(UnicodeDecodeError):
                    texts.add(text.decode())
        return frozenset(texts)

    def grammar_vocabulary(self, end_ids: Sequence[int]) -> Vocabulary:
        """The vocabulary for constrained output.

        Args:
            end_ids: tokens that end an answer.
        """
        return Vocabulary(
            tokens=[self._spelled(token) for token in range(self.n_tokens)],
            control_ids=[token for token, spelled in enumerate(self._bytes) if not spelled],
            end_ids=end_ids,
            bos_id=self._vocab.bos,
            encode=lambda text: self.encode(text, add_special=False, parse_special=False, continues=True).tolist(),
        )

    @cached_property
    def _special_around(self) -> tuple[TokenIds, TokenIds]:
        """The tokens that ``add_special`` puts before and after a text, found with an empty one."""
        added: TokenIds = self._vocab.tokenize("", add_special=True, parse_special=False)
        before = min(len(added), 1) if len(added) == 2 or self._vocab.add_bos else 0
        return added[:before], added[before:]

    @cached_property
    def _space_prefix(self) -> bool:
        """Whether the vocabulary puts a space before a text, found with a letter."""
        letter = self._vocab.tokenize("a", add_special=False, parse_special=False)
        return b"".join(self.tokens_to_bytes(letter)) == b" a"

    def _encode_continuation(self, text: str, *, parse_special: bool) -> TokenIds:
        """Tokenize after ``SENTINEL``, which takes the space prefix, and drop its tokens."""
        ahead = self._sentinel
        ids: TokenIds = self._vocab.tokenize(
            SENTINEL + text if len(ahead) else text, add_special=False, parse_special=parse_special
        )
        if not np.array_equal(ids[: len(ahead)], ahead):  # this vocabulary does merge it
            return self.encode(text, add_special=False, parse_special=parse_special)
        return ids[len(ahead) :]

    @cached_property
    def _sentinel(self) -> TokenIds:
        """The tokens of ``SENTINEL``; none if the vocabulary has no space prefix."""
        ids: TokenIds = self._vocab.tokenize(
            SENTINEL if self._space_prefix else "", add_special=False, parse_special=False
        )
        return ids

    def _checked(self, tokens: TokenIds | Iterable[int]) -> list[int]:
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.n_tokens:
                raise InvalidTokenId(f"token {token!r} is not in [0, {self.n_tokens})")
        return ids

    def _spelled(self, token: int) -> bytes:
        return self._bytes[token] or self._vocab.token_to_bytes(token, special=True)

    def _spells_bos(self, text: str) -> bool:
        """Whether the text begins with the spelling of BOS."""
        return bool(self.bos) and text.startswith(self.bos)

    def _has_unknown(self, tokens: TokenIds) -> bool:
        """Whether some of the text had no token of its own."""
        return any(self._vocab.attributes(token) & TokenAttr.UNKNOWN for token in np.unique(tokens).tolist())

    def _spelling(self, token: int, parse_special: bool) -> Spelling:
        known = self._spellings.get((token, parse_special))
        if known is None:
            kind = self._vocab.attributes(token)
            special = TokenAttr.USER_DEFINED | (CONTROL_ATTRIBUTES if parse_special else TokenAttr(0))
            known = self._spellings[token, parse_special] = Spelling(
                self._spelled(token),
                special=bool(kind & special),
                strips_left=bool(kind & TokenAttr.LSTRIP),
                strips_right=bool(kind & TokenAttr.RSTRIP),
            )
        return known


def _with_pauses(spellings: Iterable[Spelling]) -> Iterator[Spelling]:
    for n, spelling in enumerate(spellings):
        if n % TOKENS_BETWEEN_PAUSES == 0:
            time.sleep(PAUSE_S)
        yield spelling


@attrs.frozen(eq=False)
class VocabOnlyModel:
    """What a model knows without its weights."""

    tokenizer: Tokenizer
    chat_template: str | None
    """Jinja source; ``None`` if the file has none."""
    metadata: Mapping[str, str]
    """Keys of the file and their values as text, without arrays."""


@contextlib.contextmanager
def open_vocabulary(path: Path, llama_dir: Path | None = None) -> Iterator[VocabOnlyModel]:
    """Load the vocabulary of a GGUF file, without its weights, until the ``with`` block ends.  Blocks.

    Raises:
        LoadError: the file cannot be loaded, or there is no libllama to load it with.
    """
    with contextlib.ExitStack() as stack:
        try:
            library = llama_abi.load(llama_dir, backends=False)
            model = stack.enter_context(llama_abi.Model(library, path, vocab_only=True))
            vocabulary = VocabOnlyModel(Tokenizer(model.vocab), model.chat_template, model.metadata())
        except llama_abi.LlamaError as error:
            raise LoadError(str(error)) from error
        except llama_abi.LibraryError as error:
            raise LoadError(error.reason, error.remedy) from error
        yield vocabulary
