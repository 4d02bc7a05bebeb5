"""A model's vocabulary as llguidance needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance is imported with the first constraint.

LIMITS: Final[dict[str, Any]] = {
    "max_grammar_size": 200_000,
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 5_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}
"""A grammar that needs more is refused, or fails its own request.  Ordinary schemas need less than a tenth."""

STACK_BYTES: Final = 64 << 20
"""Stack of a thread that compiles grammars: llguidance recurses once for each rule that leads to another one.  The
system gives memory only to the part that is used."""


@attrs.frozen(eq=False)
class Vocabulary:
    """Tokens of a model.

    Building the prefix tree of its tokens takes about 2 us a token, once; see ``tokenizer``.
    """

    tokens: Sequence[bytes]
    """What each token stands for; control tokens as they are spelled."""
    control_ids: Sequence[int]
    """Tokens that no text contains."""
    end_ids: Sequence[int]
    """Tokens that end an answer, at least one; a grammar allows all of them where its text may end."""
    bos_id: int | None
    encode: Callable[[str], Sequence[int]]
    """Text -> token ids, without control tokens."""

    def tokenizer(self) -> LLTokenizer:
        """The vocabulary for matchers."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokenizer(self)), n_vocab=len(self.tokens), eos_token=[*self.end_ids])


class _Tokenizer:
    """The attributes that ``llguidance.TokenizerWrapper`` asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.control_ids
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return [int(token) for token in self._encode(text)]


def start_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the beginning of a grammar.  Blocks, without the GIL, for milliseconds; large schemas for a second.

    It never raises: ask ``is_error`` and ``get_error``.
    """
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
