"""Tokens of a text with a gap, as a model that fills gaps expects them.

The same tokens as llama.cpp's server, as long as they fit.  Source: ``format_prompt_infill`` there, and the figures of
https://arxiv.org/pdf/2409.12186 for several files.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

import attrs
import numpy as np

from uma_trio.engine_link.messages import ModelInfo, PromptPart
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.requests import Infill
from uma_trio.tokenizer.tokenizer import Tokenizer

WINDOW: Final = 2048
"""Tokens around the gap: three quarters before it, one quarter after it, the beginning of the answer included."""

AROUND: Final = 4
"""Tokens that a gap needs besides its texts: BOS, and one before each of three texts."""

REPOSITORY_LINE: Final = "myproject\n"
FILE_LINE: Final = "filename\n"
"""What the repository and the file with the gap are called."""

SNIPPET: Final = "\n\n--- snippet ---\n\n"
"""Stands before a further file if the vocabulary has no token for that."""


@attrs.frozen(eq=False)
class InfillFormat:
    """How a text with a gap becomes a prompt."""

    tokenizer: Tokenizer
    """Has tokens for this."""
    context: int
    """Tokens of a request, prompt and answer together."""

    def tokens(self, infill: Infill, begun: PromptPart, n_answer: int) -> tuple[TokenIds, int]:
        """Tokens of the prompt, and how many of the text were left out because there is no room.

        The text next to the gap stays, and the last files.  Control tokens that these spell stay text.
        Blocks for about 1 ms per 10 kB.

        Args:
            begun: how the missing text begins.
            n_answer: tokens that the answer may have.

        Raises:
            llama_abi.LlamaError: a text has a lone surrogate.
        """
        fim = self.tokenizer.fim
        assert fim is not None
        n_answer = min(n_answer, self.context // 4)
        window = min(WINDOW, max(0, self.context - n_answer - AROUND))
        beginning = self.tokenizer.encode(begun.text, add_special=False, parse_special=begun.parse_special).tolist()
        prefix, suffix, files = (
            self._plain(infill.prefix),
            self._plain(infill.suffix),
            self._files(infill, fim.repository, fim.file),
        )
        before = _last(prefix, 3 * (window // 4))
        after = suffix[: max(0, window // 4 - 2 - len(beginning))]
        others = _last(files, max(0, self.context - window - 2 * n_answer))
        bos = self.tokenizer.added_bos_id
        prompt = [
            *others,
            *([] if bos is None else [bos]),
            *(fim.prefix, *before, *beginning),
            *(fim.suffix, *after),
            fim.middle,
        ]
        dropped = sum(map(len, (prefix, suffix, files))) - sum(map(len, (before, after, others)))
        return np.array(prompt, np.int32), dropped

    def _files(self, infill: Infill, repository: int | None, file: int | None) -> list[int]:
        """Tokens of the further files, and of the name of the one with the gap.

        Args:
            repository: stands before the name of a repository.
            file: stands before the name of each file.
        """

        def heading(line: str) -> list[int]:
            return self._plain(SNIPPET) if file is None else [file, *self._plain(line)]

        first = [] if repository is None else [repository, *self._plain(REPOSITORY_LINE)]
        texts = ([*heading(f"{further.filename}\n"), *self._plain(further.text)] for further in infill.files)
        last = [] if file is None else heading(FILE_LINE)
        return [*first, *chain.from_iterable(texts), *last]

    def _plain(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        return tokens


def _last(tokens: list[int], n: int) -> list[int]:
    return tokens[max(0, len(tokens) - n) :]


def find_infill_format(tokenizer: Tokenizer, info: ModelInfo) -> InfillFormat | None:
    """The format of a model; ``None`` if it cannot fill gaps."""
    has_tokens = tokenizer.fim is not None and info.purpose == "generate"
    return InfillFormat(tokenizer, info.max_request_tokens) if has_tokens else None
