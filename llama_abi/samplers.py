"""llama.cpp's own samplers: the reference that ours are held to.

Serving does not use them; sampling all rows at once in numpy is several times faster.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from llama_abi.context import Context
from llama_abi.errors import LlamaError
from llama_abi.handles import Owned
from llama_abi.library import Library
from llama_abi.types import llama_token_data, llama_token_data_array

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
UINT32_MAX = 2**32 - 1


class SamplerChain(Owned):
    """Samplers in the order of adding.  Filters first, and one that chooses (greedy, dist) last.

    chain = SamplerChain(library).add_top_k(40).add_top_p(0.9).add_temp(0.8).add_dist(seed=1)
    """

    def __init__(self, library: Library) -> None:
        self._c = library.c
        self._chooses = False
        super().__init__(
            self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params()),
            self._c.llama_sampler_free,
        )

    def add_top_k(self, k: int) -> Self:
        """Keep the ``k`` likeliest tokens; 0 or less keeps all."""
        return self._add(self._c.llama_sampler_init_top_k(max(-1, min(k, 2**31 - 1))))

    def add_top_p(self, p: float, *, min_keep: int = 1) -> Self:
        """Keep the smallest set of likeliest tokens whose probabilities reach ``p``."""
        return self._add(self._c.llama_sampler_init_top_p(p, max(min_keep, 0)))

    def add_min_p(self, p: float, *, min_keep: int = 1) -> Self:
        """Keep tokens at least ``p`` times as likely as the likeliest."""
        return self._add(self._c.llama_sampler_init_min_p(p, max(min_keep, 0)))

    def add_temp(self, temperature: float) -> Self:
        """Divide logits by ``temperature``; at 0 or less only the likeliest stays."""
        return self._add(self._c.llama_sampler_init_temp(temperature))

    def add_penalties(
        self, n_vocab: int, *, last_n: int, repeat: float = 1.0, frequency: float = 0.0, presence: float = 0.0
    ) -> Self:
        """Make tokens unlikelier that ``accept`` has seen among the last ``last_n``."""
        if repeat <= 0 or last_n < 0:
            raise LlamaError("repeat must be above 0, and last_n not negative")
        return self._add(self._c.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence))

    def add_dist(self, *, seed: int) -> Self:
        """Choose at random; the same ``seed`` makes the same choices."""
        self._chooses = True
        return self._add(self._c.llama_sampler_init_dist(seed & UINT32_MAX))

    def add_greedy(self) -> Self:
        """Choose the likeliest."""
        self._chooses = True
        return self._add(self._c.llama_sampler_init_greedy())

    def sample(self, context: Context, index: int) -> int:
        """Choose a token after batch position ``index`` of the context's last decode, and accept it.

        Raises:
            LlamaError: nothing in the chain chooses, or no logits were asked for at ``index``.
        """
        pointer = self._pointer
        if not self._chooses:
            raise LlamaError("the chain has no sampler that chooses: add_greedy or add_dist")
        if not context._has_logits(index):
            raise LlamaError(f"the last decode gave no logits at batch position {index}")
        return int(self._c.llama_sampler_sample(pointer, context._pointer, index))

    def apply(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """What the chain leaves of one row of logits.

        Args:
            logits: ``[n_vocab]``; not changed.

        Returns:
            ``(ids, probabilities)`` of the tokens that are left, likeliest first; the
            probabilities are renormalised and sum to one.
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
        # A sampler may have pointed the array at memory of its own.
        address = ctypes.cast(array.data, ctypes.c_void_p).value or 0
        size = array.size * TOKEN_DATA.itemsize
        left = np.frombuffer((ctypes.c_char * size).from_address(address), TOKEN_DATA).copy()
        left = left[np.isfinite(left["logit"])]
        left = left[np.argsort(-left["logit"], kind="stable")]
        weights = np.exp(left["logit"].astype(np.float64) - left["logit"][0])
        return left["id"].copy(), weights / weights.sum()

    def accept(self, token: int) -> None:
        """Tell the chain that ``token`` follows; ``sample`` has done so already."""
        self._c.llama_sampler_accept(self._pointer, token)

    def reset(self) -> None:
        """Forget accepted tokens, and start random numbers anew."""
        self._c.llama_sampler_reset(self._pointer)

    def _add(self, sampler: Any) -> Self:
        self._c.llama_sampler_chain_add(self._pointer, sampler)
        return self
