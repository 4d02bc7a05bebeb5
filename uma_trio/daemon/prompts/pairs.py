"""Tokens of a query with a document, as a model that ranks expects them.

Source: llama.cpp's server, ``format_prompt_rerank``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from uma_trio.daemon.prompts.control_tokens import ControlTokens
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.tokenizer.tokenizer import Tokenizer

TEMPLATE_KEY: Final = "tokenizer.chat_template.rerank"
PLACES: Final = re.compile(r"\{(query|document)\}")

WORDPIECE: Final = "bert"
WORDPIECE_SEPARATOR: Final = 102
SEPARATING: Final = frozenset({"jina-v1-en", "jina-v2-code", "roberta-bpe"})
"""Values of ``tokenizer.ggml.pre`` with which a separator stands between two texts.  Source: llama-vocab.cpp, ``load``."""


@attrs.frozen(eq=False)
class PairFormat:
    """How a query and a document become one text."""

    tokenizer: Tokenizer
    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    """Tokens before the query, between query and document, and after the document."""
    template: str | None = None
    """Text with ``{query}`` and ``{document}``, in place of these tokens."""
    controls: ControlTokens = attrs.field(factory=ControlTokens)

    def tokens(self, query: str, documents: Sequence[str]) -> list[TokenIds]:
        """Tokens of the query with each of ``documents``.  Control tokens that these spell stay text.

        Blocks for about 1 ms per 10 kB.

        Raises:
            llama_abi.LlamaError: a text has a lone surrogate.
        """
        if self.template is not None:
            return [self._rendered(self.template, query, document) for document in documents]
        first = [*self.before, *self._plain(query), *self.between]
        return [np.array([*first, *self._plain(document), *self.after], np.int32) for document in documents]

    def _plain(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        return tokens

    def _rendered(self, template: str, query: str, document: str) -> TokenIds:
        texts = {"query": self.controls.mask(query), "document": self.controls.mask(document)}
        parts = self.controls.split(PLACES.sub(lambda field: texts[field[1]], template))
        tokens = [
            self.tokenizer.encode(part.text, add_special=False, parse_special=part.parse_special, continues=number > 0)
            for number, part in enumerate(parts)
        ]
        return np.concatenate(tokens)


def find_pair_format(metadata: Mapping[str, str], tokenizer: Tokenizer) -> PairFormat:
    """The format of a model.

    Args:
        metadata: of its file, without arrays.
    """
    model, template = metadata.get("tokenizer.ggml.model"), metadata.get(TEMPLATE_KEY)
    separates = model == WORDPIECE or metadata.get("tokenizer.ggml.pre") in SEPARATING
    if (said := metadata.get("tokenizer.ggml.add_sep_token")) is not None:
        separates = said == "true"
    separator = metadata.get("tokenizer.ggml.seperator_token_id")  # as the key is spelled
    sep_id = WORDPIECE_SEPARATOR if separator is None and model == WORDPIECE else int(separator or -1)
    sep = [sep_id] if 0 <= sep_id < tokenizer.n_tokens else []
    end = ([*sep] if tokenizer.eos_id is None else [tokenizer.eos_id]) if tokenizer.adds_eos else []
    controls = ControlTokens()
    if template is not None:
        controls = ControlTokens(tokenizer.control_tokens, tokenizer.user_defined_controls)
    return PairFormat(
        tokenizer,
        before=() if tokenizer.added_bos_id is None else (tokenizer.added_bos_id,),
        between=(*end, *(sep if separates else ())),
        after=tuple(end),
        template=template,
        controls=controls,
    )
