"""The context of a request in words, and the settings that give it more."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tests.support.cases import all_cases
from tests.support.serving import settings
from uma_trio.config import Limits
from uma_trio.daemon.prompts.context import explain_context, is_short, max_prompt_bytes, more_context
from uma_trio.daemon.prompts.prompt import tokens_to_generate
from uma_trio.engine.layout import Environment, Shape, candidates
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.errors import ContextTooSmall
from uma_trio.protocol.requests import Generate

INFO = ModelInfo(
    name="m",
    description="",
    n_vocab=10,
    n_ctx=4096,
    n_ctx_seq=512,
    n_ctx_train=32768,
    n_batch=32,
    n_seq_max=8,
    eog_ids=(0,),
    size_bytes=1,
    n_params=1,
    unified=False,
    kv_bytes_per_token=1000,
)
"""As after: serve --ctx 4096 --parallel 8, with per-sequence KV."""


def info(**fields: Any) -> ModelInfo:
    return msgspec.structs.replace(INFO, **fields)


SHARED = info(unified=True, n_ctx_seq=4096)
ALONE = info(n_seq_max=1, n_ctx_seq=4096)
TRAINED = info(n_ctx=65536, n_ctx_seq=8192, n_ctx_train=8192)
LIMITED = info(kv_mem_limited=True)


@all_cases(
    ("model", "words", "more"),
    [
        (
            INFO,
            "512 tokens for a request: a KV cache of 4096 tokens, divided among 8 sequences",
            "--ctx 65536, --kv-unified on --ctx 8192 or --parallel 1 --ctx 4096",
        ),
        (
            info(n_ctx=32768, n_ctx_seq=4096),
            "4096 tokens for a request: a KV cache of 32768 tokens, divided among 8 sequences",
            "--ctx 65536, --kv-unified on --ctx 32768 or --parallel 4 --ctx 32768",
        ),
        (SHARED, "4096 tokens for a request, which is the whole KV cache", "--kv-unified on --ctx 8192"),
        (ALONE, "4096 tokens for a request, which is the whole KV cache", "--ctx 8192"),
        (TRAINED, "8192 tokens for a request, as many as the model was trained with", None),
        (LIMITED, "512 tokens for a request: a KV cache of 4096 tokens, divided among 8 sequences", "--kv-mem-limit-mb 66 or --parallel 1 --ctx 4096"),
    ]
,
)  # fmt: skip
def test_the_context_and_what_gives_more(model: ModelInfo, words: str, more: str | None) -> None:
    assert explain_context(model) == words
    assert more_context(model) == more


def test_what_gives_a_request_its_context() -> None:
    assert more_context(INFO, 513) == "--ctx 6144, --kv-unified on --ctx 4096 or --parallel 5 --ctx 4096"
    assert more_context(INFO, 4096) == "--ctx 32768, --kv-unified on --ctx 4096 or --parallel 1 --ctx 4096"
    assert more_context(INFO, 512) is None
    assert more_context(INFO, 32768) == "--ctx 262144 or --kv-unified on --ctx 32768"
    assert more_context(LIMITED, 32768) == "--kv-mem-limit-mb 263"
    assert more_context(INFO, 32769) is None, "no setting helps beyond what the model was trained with"


def test_the_settings_keep_their_promise() -> None:
    """With each proposal a request has room."""
    for wanted in (513, 768, 4096, 5000, 32768):
        ways = re.split(", | or ", more_context(INFO, wanted) or "")
        assert len(ways) == (3 if wanted <= INFO.n_ctx else 2)
        for way in ways:
            words = way.split()
            given = dict(zip(words[::2], words[1::2], strict=True))
            parallel = int(given.pop("--parallel", "8"))
            model = settings(
                ctx=int(given.pop("--ctx")), parallel=parallel, kv_unified=given.pop("--kv-unified", "off")
            ).model
            assert not given
            shape = Shape(n_ctx_train=INFO.n_ctx_train, kv_bytes_per_token=1000)
            (layout, *_) = candidates(shape, model, Environment(on_gpu=False), memory_bytes=1 << 40, windowed=False)
            assert layout.n_ctx // (1 if layout.unified else parallel) >= wanted


def test_more_context_on_a_gpu_where_a_larger_one_alone_would_be_divided() -> None:
    """With CUDA the rule is per-sequence KV from 8192 tokens for each sequence on: a request would get a share only."""
    proposal = more_context(info(n_ctx=32768, n_ctx_seq=32768, n_ctx_train=131072, unified=True), 100_000)
    assert proposal == "--kv-unified on --ctx 100096"

    def room(**given: Any) -> int:
        shape = Shape(n_ctx_train=131072, kv_bytes_per_token=1000)
        model, cuda = settings(parallel=8, **given).model, Environment(on_gpu=True, computes_masked_cells=True)
        (layout, *_) = candidates(shape, model, cuda, memory_bytes=1 << 40, windowed=False)
        return layout.n_ctx if layout.unified else layout.n_ctx // 8

    assert room(ctx=32768) == 32768, "as it runs"
    assert room(ctx=100_096) < 32768
    assert room(ctx=100_096, kv_unified="on") >= 100_000


@all_cases("limits", [Limits(), Limits(default_max_tokens=512)])
@all_cases(("n_ctx_seq", "short"), [(1023, True), (1024, False)])
def test_when_the_start_warns(n_ctx_seq: int, short: bool, limits: Limits) -> None:
    assert is_short(info(n_ctx_seq=n_ctx_seq), limits) == short
    assert not is_short(info(n_ctx_seq=512, n_ctx_train=512), limits), "the model allows no more"


def test_a_refusal_names_the_context_of_a_request_and_the_settings() -> None:
    def refusal(n_prompt: int, max_tokens: int | None, model: ModelInfo = INFO) -> str:
        with pytest.raises(ContextTooSmall) as refused:
            tokens_to_generate(Generate(id="r", prompt="x", max_tokens=max_tokens), n_prompt, model, Limits())
        return str(refused.value)

    assert refusal(900, None) == (
        "the prompt has 900 tokens, and this model's maximum context length is 512 tokens for a request: a KV cache of "
        "4096 tokens, divided among 8 sequences; send a shorter one, or start uma-trio serve with --ctx 8192, "
        "--kv-unified on --ctx 4096 or --parallel 4 --ctx 4096"
    )
    assert refusal(100, 1000) == (
        "100 prompt tokens and max_tokens 1000 are too many; this model's maximum context length is 512 tokens for a "
        "request: a KV cache of 4096 tokens, divided among 8 sequences; ask for at most 413, or start uma-trio serve with --ctx 10240, "
        "--kv-unified on --ctx 4096 or --parallel 3 --ctx 4096"
    )
    assert refusal(9000, None, TRAINED).endswith("as many as the model was trained with; send a shorter one")


def test_a_max_tokens_that_may_be_fitted_is_one_of_open_length_where_there_is_no_room() -> None:
    def given(max_tokens: int | None, limits: Limits | None = None, *, fit: bool = True) -> int:
        request = Generate(id="r", prompt="x", max_tokens=max_tokens, fit_max_tokens=fit)
        return tokens_to_generate(request, 100, INFO, limits or Limits())

    room = given(413, fit=False)
    assert room == 413
    assert given(413) == 413, "as asked, where it fits"
    assert given(414) == given(2**31 - 1) == given(None)
    assert given(400, Limits(max_tokens=300)) == given(None, Limits(max_tokens=300)) == 300


def test_the_largest_prompt_in_bytes_follows_the_context() -> None:
    assert max_prompt_bytes(Limits(), INFO) == 256 << 10
    assert max_prompt_bytes(Limits(), msgspec.structs.replace(INFO, n_ctx_seq=131_072, n_ctx_train=131_072)) == 1 << 20
    assert max_prompt_bytes(Limits(max_prompt_bytes=5), INFO) == 5
