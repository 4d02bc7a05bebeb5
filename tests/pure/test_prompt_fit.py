"""Whether a request can be served at all, with the numbers in the answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.config import Limits
from uma_trio.daemon.prompts.prompt import tokens_to_generate
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.errors import BadRequest, ContextTooSmall, LimitError, MaxTokensTooLarge, PromptTooLarge
from uma_trio.protocol.requests import Generate


def model_info(*, n_ctx_seq: int = 100, n_ctx_train: int = 1000, unified: bool = False) -> ModelInfo:
    """A model with four sequences.  With unified KV each of them can have all cells."""
    return ModelInfo(
        name="m",
        description="",
        n_vocab=10,
        n_ctx=n_ctx_seq if unified else 4 * n_ctx_seq,
        unified=unified,
        n_ctx_seq=n_ctx_seq,
        n_ctx_train=n_ctx_train,
        n_batch=32,
        n_seq_max=4,
        eog_ids=(0,),
        size_bytes=1,
        n_params=1,
    )


def ask(max_tokens: int | None = None) -> Generate:
    return Generate(id="r", prompt="x", max_tokens=max_tokens)


LIMITS = Limits(max_prompt_tokens=90, max_tokens=60, default_max_tokens=20)


def test_a_request_that_names_no_number_gets_the_default_or_what_there_is() -> None:
    assert tokens_to_generate(ask(), 10, model_info(), LIMITS) == 20
    assert tokens_to_generate(ask(), 90, model_info(), LIMITS) == 11
    assert tokens_to_generate(ask(), 10, model_info(), Limits(default_max_tokens=50, max_tokens=5)) == 5


@all_cases("n_prompt", [1, 50, 100])
def test_an_answer_of_open_length_may_fill_its_own_sequence(n_prompt: int) -> None:
    assert tokens_to_generate(ask(), n_prompt, model_info(), Limits()) == 101 - n_prompt


@all_cases(
    ("n_prompt", "granted"),
    [
        (1, 4000),  # the share of one of four sequences
        (1001, 3000),
        (2000, 2001),
        (3000, 2000),  # at least half a share
        (10_000, 2000),
        (15_000, 1001),  # what the context has
    ],
)
def test_with_unified_kv_an_answer_of_open_length_may_fill_a_share(n_prompt: int, granted: int) -> None:
    model = model_info(n_ctx_seq=16_000, n_ctx_train=100_000, unified=True)
    assert tokens_to_generate(ask(), n_prompt, model, Limits()) == granted


def test_a_small_share_is_no_low_default() -> None:
    model = model_info(n_ctx_seq=1000, unified=True)
    assert [tokens_to_generate(ask(), n, model, Limits()) for n in (1, 200, 900)] == [512, 512, 101]


@given(st.integers(1, 2000), st.integers(2048, 100_000))
def test_as_many_answers_of_open_length_fit_as_there_are_sequences(n_prompt: int, n_ctx: int) -> None:
    """Unless a prompt takes more than half of its share, or shares are small."""
    model = model_info(n_ctx_seq=n_ctx, n_ctx_train=10**6, unified=True)
    share = n_ctx // 4
    if n_prompt <= share // 2 and share - n_prompt >= 512:
        assert 4 * (n_prompt + tokens_to_generate(ask(), n_prompt, model, Limits()) - 1) <= n_ctx


def test_the_last_token_needs_no_cell() -> None:
    """A prompt of the whole window has room for one token, which is never fed back."""
    roomy = Limits(max_tokens=10**6)
    assert tokens_to_generate(ask(1), 100, model_info(), roomy) == 1
    assert tokens_to_generate(ask(), 100, model_info(), roomy) == 1
    assert tokens_to_generate(ask(100), 1, model_info(), roomy) == 100
    for n_prompt, max_tokens in ((100, 2), (1, 101)):
        with pytest.raises(ContextTooSmall, match=f"ask for at most {101 - n_prompt}"):
            tokens_to_generate(ask(max_tokens), n_prompt, model_info(), roomy)
    with pytest.raises(
        ContextTooSmall, match="the prompt has 101 tokens, and this model's maximum context length is 100 tokens"
    ):
        tokens_to_generate(ask(), 101, model_info(), roomy)


def test_the_window_is_the_smaller_of_the_cache_and_the_training() -> None:
    assert tokens_to_generate(ask(50), 51, model_info(n_ctx_train=100, n_ctx_seq=1000), LIMITS) == 50
    with pytest.raises(ContextTooSmall):
        tokens_to_generate(ask(51), 51, model_info(n_ctx_train=100, n_ctx_seq=1000), LIMITS)


def test_what_is_beyond_a_limit() -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        tokens_to_generate(ask(), 0, model_info(), LIMITS)
    with pytest.raises(PromptTooLarge, match="91 tokens; this daemon takes 90"):
        tokens_to_generate(ask(), 91, model_info(), LIMITS)
    with pytest.raises(MaxTokensTooLarge, match="61; this daemon gives 60"):
        tokens_to_generate(ask(61), 1, model_info(), LIMITS)


@given(
    st.integers(0, 300),
    st.none() | st.integers(1, 300),
    st.builds(model_info, n_ctx_seq=st.integers(1, 200), n_ctx_train=st.integers(1, 200), unified=st.booleans()),
    st.builds(
        Limits,
        max_prompt_tokens=st.integers(1, 300),
        max_tokens=st.integers(1, 300),
        default_max_tokens=st.integers(0, 300),
    ),
)
def test_what_is_granted_fits_and_is_what_was_asked(
    n_prompt: int, max_tokens: int | None, model: ModelInfo, limits: Limits
) -> None:
    try:
        granted = tokens_to_generate(ask(max_tokens), n_prompt, model, limits)
    except (LimitError, BadRequest):
        impossible = (
            n_prompt == 0
            or n_prompt > limits.max_prompt_tokens
            or n_prompt + (max_tokens or 1) - 1 > model.max_request_tokens
            or (max_tokens or 1) > limits.max_tokens
        )
        assert impossible
    else:
        assert 1 <= granted <= limits.max_tokens
        assert n_prompt + granted - 1 <= model.max_request_tokens
        assert max_tokens in (None, granted)
