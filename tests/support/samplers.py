"""llama.cpp's samplers, as a reference.

Serving does not use them: sampling all rows of a step at once in numpy is several times faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from llama_abi.context import Context
from llama_abi.errors import LlamaError
from llama_abi.handles import Handle
from llama_abi.library import Library
from llama_abi.types import llama_token_data, llama_token_data_array
from llama_abi.vocab import Vocab

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
UINT32_MAX = 2**32 - 1


class SamplerChain(Handle):
    """A chain of samplers, applied in the order in which they were added. The last one must choose (greedy or dist).

    chain = SamplerChain(library).add_top_k(40).add_top_p(0.9).add_temp(0.8).add_dist(seed=1)
    """

    def __init__(self, library: Library) -> None:
        self._c = library.c
        self._chooses = False
        self.chosen: int | None = None
        """The token that a sampler of the chain chose in the last ``apply``."""
        super().__init__(
            self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params()),
            self._c.llama_sampler_free,
        )

    def add_top_k(self, k: int) -> Self:
        """Keep the ``k`` likeliest tokens; 0 or less keeps all."""
        return self._add(self._c.llama_sampler_init_top_k(max(-1, min(k, 2**31 - 1))))

    def add_top_p(self, p: float) -> Self:
        """Keep the smallest set of likeliest tokens whose probabilities reach ``p``."""
        return self._add(self._c.llama_sampler_init_top_p(p, 1))

    def add_min_p(self, p: float) -> Self:
        """Keep tokens that are at least ``p`` times as likely as the likeliest."""
        return self._add(self._c.llama_sampler_init_min_p(p, 1))

    def add_top_n_sigma(self, n: float) -> Self:
        """Keep tokens whose logit is at most ``n`` standard deviations below the largest one; 0 keeps all."""
        return self._add(self._c.llama_sampler_init_top_n_sigma(n))

    def add_typical_p(self, p: float) -> Self:
        """Keep the tokens whose surprise is nearest to the expected one, until their probabilities exceed ``p``."""
        return self._add(self._c.llama_sampler_init_typical(p, 1))

    def add_xtc(self, probability: float, threshold: float) -> Self:
        """With this ``probability``, exclude all tokens that have at least ``threshold``, but the least likely of them."""
        return self._add(self._c.llama_sampler_init_xtc(probability, threshold, 1, 0))

    def add_temp(self, temperature: float, *, range: float = 0.0, exponent: float = 1.0) -> Self:
        """Divide the logits by ``temperature``. At 0 or less only the likeliest token is kept.

        With a ``range``, the entropy decides how far the temperature is below or above.
        """
        return self._add(self._c.llama_sampler_init_temp_ext(temperature, range, exponent))

    def add_penalties(
        self, n_vocab: int, *, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> Self:
        """Make the last ``last_n`` accepted tokens less likely."""
        if repeat <= 0 or last_n < 0:
            raise LlamaError("repeat must be above 0, and last_n must not be negative")
        return self._add(self._c.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence))

    def add_dry(
        self, vocab: Vocab, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Sequence[str]
    ) -> Self:
        """Make accepted tokens less likely that would continue a repetition."""
        texts = (ctypes.c_char_p * len(breakers))(*[each.encode() for each in breakers])
        return self._add(
            self._c.llama_sampler_init_dry(
                vocab._pointer, multiplier, base, allowed_length, last_n, texts, len(breakers)
            )
        )

    def add_mirostat_v2(self, *, seed: int, tau: float, eta: float) -> Self:
        """Keep tokens whose surprise is below a limit, and choose one at random. Each choice changes the limit."""
        self._chooses = True
        return self._add(self._c.llama_sampler_init_mirostat_v2(seed & UINT32_MAX, tau, eta))

    def add_dist(self, *, seed: int) -> Self:
        """Choose at random. The same ``seed`` makes the same choices."""
        self._chooses = True
        return self._add(self._c.llama_sampler_init_dist(seed & UINT32_MAX))

    def add_greedy(self) -> Self:
        """Choose the likeliest token."""
        self._chooses = True
        return self._add(self._c.llama_sampler_init_greedy())

    def sample(self, context: Context, index: int) -> int:
        """Choose a token after batch position ``index`` of the context's last decode, and accept it.

        Raises:
            LlamaError: no sampler of the chain chooses, or the token at ``index`` has no logits.
        """
        pointer = self._pointer
        if not self._chooses:
            raise LlamaError("no sampler of the chain chooses; call add_greedy or add_dist")
        if not context._has_logits(index):
            raise LlamaError(f"the last decode returned no logits for batch position {index}")
        return int(self._c.llama_sampler_sample(pointer, context._pointer, index))

    def apply(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Filter one row of logits.

        Args:
            logits: shape ``[n_vocab]``; not changed.

        Returns:
            ``(ids, probabilities)`` of the tokens that the chain keeps, likeliest first. Probabilities sum to one.
        """
        pointer = self._pointer
        if logits.ndim != 1 or len(logits) < 1:
            raise LlamaError("apply takes one row of logits")
        data = np.zeros(len(logits), TOKEN_DATA)
        data["id"] = np.arange(len(logits))
        data["logit"] = logits
        array = llama_token_data_array(
            data=ctypes.cast(data.ctypes.data, ctypes.POINTER(llama_token_data)),
            size=len(data),
            selected=-1,
            sorted=False,
        )
        self._c.llama_sampler_apply(pointer, ctypes.byref(array))
        # A sampler may have replaced the array's data with memory of its own.
        address = ctypes.cast(array.data, ctypes.c_void_p).value or 0
        size = array.size * TOKEN_DATA.itemsize
        kept = np.frombuffer((ctypes.c_char * size).from_address(address), TOKEN_DATA).copy()
        self.chosen = None if array.selected < 0 else int(kept["id"][array.selected])
        kept = kept[np.isfinite(kept["logit"])]
        kept = kept[np.argsort(-kept["logit"], kind="stable")]
        weights = np.exp(kept["logit"].astype(np.float64) - kept["logit"][0])
        return kept["id"].copy(), weights / weights.sum()

    def accept(self, token: int) -> None:
        """Record that ``token`` follows, for penalties. ``sample`` does so itself."""
        self._c.llama_sampler_accept(self._pointer, token)

    def reset(self) -> None:
        """Forget the accepted tokens, and restart the random numbers."""
        self._c.llama_sampler_reset(self._pointer)

    def _add(self, sampler: Any) -> Self:
        self._c.llama_sampler_chain_add(self._pointer, sampler)
        return self
