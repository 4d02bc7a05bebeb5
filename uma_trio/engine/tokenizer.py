"""Text to token ids and token ids to bytes, with a loaded model's vocabulary."""

from __future__ import annotations

import numpy as np

import llama_abi
from uma_trio.engine.records import TokenIds


class Tokenizer:
    """A model's vocabulary.

    Reads only what never changes after loading, so any thread may call it, also while the engine
    computes.  Of no use after the model is closed.
    """

    def __init__(self, vocab: llama_abi.Vocab) -> None:
        self._vocab = vocab
        self._pieces = vocab.pieces(special=False)
        self.bos = "" if vocab.bos is None else vocab.piece(vocab.bos, special=True).decode("utf-8", "replace")
        self.eos = "" if vocab.eos is None else vocab.piece(vocab.eos, special=True).decode("utf-8", "replace")

    def encode(self, text: str, *, continues: bool = False) -> TokenIds:
        """Token ids of a prompt, shape ``[n]``, int32.

        Control tokens spelled out in the text are taken for what they spell, and the model's
        begin-of-sequence token is put in front where the model wants one and the text has none.
        Blocks for about 1 ms for each 10 kB.

        Args:
            continues: something stands before it, so nothing is put in front.
        """
        starts_itself = continues or (bool(self.bos) and text.startswith(self.bos))
        ids: TokenIds = self._vocab.tokenize(text, add_special=not starts_itself, parse_special=True)
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; a control token stands for none."""
        return self._pieces[token]

    def text(self, tokens: TokenIds) -> str:
        """What ``tokens`` say, control tokens spelled out."""
        return b"".join(self.pieces_of(tokens)).decode("utf-8", "replace")

    def pieces_of(self, tokens: TokenIds) -> list[bytes]:
        """The bytes of each of ``tokens``, control tokens spelled out."""
        return [self._vocab.piece(int(token), special=True) for token in np.asarray(tokens)]
