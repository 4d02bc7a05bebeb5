"""DRY makes the same tokens less likely, by as much, as llama.cpp's sampler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import llama_abi
from tests.support.draws import distribution
from tests.support.samplers import SamplerChain
from uma_trio import models
from uma_trio.engine.llama import breakers_of
from uma_trio.engine_link.sampling import Past, SamplingParams
from uma_trio.tokenizer.tokenizer import Tokenizer

TEXT = (
    'The cat sat on the mat. The cat sat on the hat.\n"Then" the cat: sat on the mat. One two three four five six '
    "seven. One two three four five six "
)


@pytest.fixture(scope="module")
def model() -> Iterator[llama_abi.Model]:
    try:
        library = llama_abi.load()
    except llama_abi.LibraryError as error:
        pytest.skip(f"{error}: ./build_llama.sh builds it")
    with llama_abi.Model(
        library, Path(models.__file__).parent / "embedded" / "embedded.gguf", vocab_only=True
    ) as opened:
        yield opened


@pytest.mark.parametrize("breakers", [["\n", ":", '"', "*"], [], [" sat on", "ree fo"], ["e", " six "]], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dry_base": 1.0},
        {"dry_base": 1.2, "dry_allowed_length": 1},
        {"dry_allowed_length": 5},
        {"dry_penalty_last_n": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [TEXT, TEXT[:60], "a a a a a a a a ", "One"], ids=len)
def test_logits(model: llama_abi.Model, text: str, fields: dict[str, float], breakers: list[str]) -> None:
    tokenizer = Tokenizer(model.vocab)
    tokens = tokenizer.encode(text, add_special=False)
    params = SamplingParams(**{"temperature": 1.0, "dry_multiplier": 0.8, **fields})
    logits = np.random.default_rng(len(text)).standard_normal(tokenizer.n_tokens).astype(np.float32)
    with SamplerChain(model.library) as chain:
        chain.add_dry(
            model.vocab,
            multiplier=params.dry_multiplier,
            base=params.dry_base,
            allowed_length=params.dry_allowed_length,
            last_n=params.dry_penalty_last_n,
            breakers=breakers,
        )
        for token in tokens.tolist():
            chain.accept(token)
        ids, expected = chain.apply(logits)
    found_ids, found = distribution(
        logits.copy(), params, past=Past(tokens, len(tokens)), breakers=breakers_of(tokenizer, breakers)
    )
    ours, theirs = np.zeros(tokenizer.n_tokens), np.zeros(tokenizer.n_tokens)
    ours[found_ids], theirs[ids] = found, expected
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-12)
