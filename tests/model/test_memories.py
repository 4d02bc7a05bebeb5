"""Sliding-window and recurrent memories of llama.cpp: which truncations, copies and saved states are exact.

The KV cache and the saved states rely on these properties of the pinned llama.cpp.  Flash attention is off: on a CPU its
order of additions depends on the size of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import llama_abi
from llama_abi import PARTIAL_ONLY, Batch, Context, ContextOptions, LlamaError, Model
from tests.support.gpu import same_logits, tolerance
from tests.support.random_models import random_model

Logits = npt.NDArray[np.float32]

WINDOW = 64
UBATCH = 64
TEXT: list[int] = np.random.default_rng(5).integers(100, 30_000, 1000).tolist()
OTHER: list[int] = np.random.default_rng(6).integers(100, 30_000, 200).tolist()
NEXT = OTHER[:8]

UNIFY = pytest.mark.parametrize("unified", [False, True], ids=["per-sequence", "unified"])


@pytest.fixture(scope="module")
def windowed(library: None) -> Iterator[Model]:
    with Model(llama_abi.load(), random_model("tiny-swa")) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(library: None) -> Iterator[Model]:
    with Model(llama_abi.load(), random_model("tiny-hybrid")) as model:
        yield model


def a_context(model: Model, **options: Any) -> Context:
    common: dict[str, Any] = {"n_ctx": 4096, "n_batch": 256, "n_ubatch": UBATCH, "n_seq_max": 4, "flash_attn": "off"}
    return Context(model, ContextOptions(**common | options))


def feed(context: Context, tokens: Sequence[int], *, pos: int = 0, seq: int = 0) -> Logits:
    """Compute ``tokens`` in calls of ``UBATCH``; returns the logits after the last one."""
    batch = Batch(UBATCH)
    for start in range(0, len(tokens), UBATCH):
        batch.clear()
        batch.add(tokens[start : start + UBATCH], pos=pos + start, seq=seq)
        assert context.decode(batch) == llama_abi.OK
    return context.logits(1).array[0].copy()


def expected_logits(context: Context, length: int) -> Logits:
    """The logits after ``NEXT`` in a sequence that never had more than ``length`` tokens before it."""
    feed(context, TEXT[:length])
    logits = feed(context, NEXT, pos=length)
    context.clear()
    return logits


def saved(context: Context, seq: int = 0, *, flags: int = 0) -> bytearray:
    state = bytearray(context.state_size(seq, flags=flags))
    assert context.save_state_into(seq, state, flags=flags) == len(state)
    return state


def held(context: Context, seq: int = 0) -> tuple[int, int]:
    return context.seq_pos_min(seq), context.seq_pos_max(seq)


class TestWindow:
    """Sliding-window attention.  ``seq_remove`` always returns True, although not every truncation is exact.

    A truncation is exact if the window before the new end is complete: ``seq_pos_min(seq) <= max(0, end - WINDOW + 1)``.
    """

    @UNIFY
    def test_a_full_cache_keeps_everything_and_can_be_truncated(self, windowed: Model, unified: bool) -> None:
        with a_context(windowed, kv_unified=unified) as context:
            expected = expected_logits(context, 192)
            feed(context, TEXT[:900])
            assert held(context) == (0, 899)
            assert context.seq_remove(0, 192)
            assert same_logits(feed(context, NEXT, pos=192), expected)

    @UNIFY
    def test_a_saved_state_contains_the_window_only(self, windowed: Model, unified: bool) -> None:
        """It continues bit for bit, also in another sequence.  It can be truncated by one token only."""
        with a_context(windowed, kv_unified=unified) as context:
            feed(context, TEXT[:320])
            state = saved(context)
            expected = feed(context, NEXT, pos=320)
            assert context.load_state_from(2, state)
            assert held(context, 2) == (320 - WINDOW, 319)
            assert same_logits(feed(context, NEXT, pos=320, seq=2), expected)
            context.clear()
            for end, sound in ((319, True), (300, False), (200, False)):
                expected = expected_logits(context, end)
                context.load_state_from(2, state)
                assert context.seq_remove(2, end), "it always returns True"
                # Beyond the window the sequence counts as empty, although the full layers keep their cells.
                assert held(context, 2) == ((320 - WINDOW, end - 1) if end > 320 - WINDOW else (-1, -1))
                assert same_logits(feed(context, NEXT, pos=end, seq=2), expected) == sound
                context.clear()

    @pytest.mark.cpu("one token of a window changes the logits no more than rounding does")
    def test_a_saved_state_cannot_be_truncated_by_two_tokens(self, windowed: Model) -> None:
        with a_context(windowed) as context:
            expected = expected_logits(context, 318)
            feed(context, TEXT[:320])
            state = saved(context)
            context.load_state_from(2, state)
            assert context.seq_remove(2, 318), "it always returns True"
            assert not same_logits(feed(context, NEXT, pos=318, seq=2), expected)

    @UNIFY
    def test_a_small_cache_drops_old_tokens(self, windowed: Model, unified: bool) -> None:
        """With ``swa_full=False`` the number of kept tokens depends on what else was computed."""
        with a_context(windowed, kv_unified=unified, swa_full=False) as context:
            expected = expected_logits(context, 256)
            feed(context, TEXT[:900])
            first = context.seq_pos_min(0)
            assert 0 < first <= 900 - WINDOW
            assert context.seq_remove(0, first + WINDOW - 1)
            within = feed(context, NEXT, pos=first + WINDOW - 1)
            context.clear()
            assert same_logits(within, expected_logits(context, first + WINDOW - 1))
            feed(context, TEXT[:900])
            assert context.seq_remove(0, 256), "it returns True"
            assert not same_logits(feed(context, NEXT, pos=256), expected)
            context.clear()

    @UNIFY
    def test_a_wrapped_small_cache_continues_with_rounding_differences(self, windowed: Model, unified: bool) -> None:
        """A loaded state has its cells in the order of positions.  After a wrap that is another order than before, so the
        kernels of some processors round differently.  Before the first wrap it continues bit for bit."""
        with a_context(windowed, kv_unified=unified, swa_full=False) as context:
            for length, exact in ((200, True), (900, False)):
                feed(context, TEXT[:length])
                state = saved(context)
                expected = feed(context, NEXT, pos=length)
                context.load_state_from(1, state)
                found = feed(context, NEXT, pos=length, seq=1)
                assert same_logits(found, expected) or not exact
                # 0.99 if the last two tokens before are others, 0.06 without those before
                assert np.corrcoef(found, expected)[0, 1] > 1 - tolerance(1e-4, on_gpu=1e-3)
                context.clear()

    def test_another_sequence_takes_cells_behind_the_window(self, windowed: Model) -> None:
        """With unified KV ``swa_full`` guarantees nothing: llama.cpp searches for a free cell from the last freed one on,
        and cells behind their sequence's window count as free."""
        with a_context(windowed, kv_unified=True, n_ctx=1024) as context:
            expected = expected_logits(context, 130)
            feed(context, TEXT[:64])
            feed(context, OTHER[:64], seq=1)
            feed(context, TEXT[64:300], pos=64)
            context.seq_remove(1)
            assert held(context) == (0, 299)
            feed(context, OTHER, seq=2)
            first = context.seq_pos_min(0)
            assert 130 < first <= 300 - WINDOW
            assert context.seq_remove(0, 130)
            assert not same_logits(feed(context, NEXT, pos=130), expected)

    def test_with_per_sequence_kv_no_cell_is_taken(self, windowed: Model) -> None:
        with a_context(windowed, n_ctx=2048) as context:
            expected = expected_logits(context, 130)
            feed(context, TEXT[:300])
            for seq in (1, 2, 3):
                feed(context, TEXT[:500], seq=seq)
                context.seq_remove(seq, 64)
            assert held(context) == (0, 299)
            assert context.seq_remove(0, 130)
            assert same_logits(feed(context, NEXT, pos=130), expected)

    @UNIFY
    @pytest.mark.parametrize("first", ["load", "remove"])
    def test_truncation_to_a_checkpoint(self, windowed: Model, unified: bool, first: str) -> None:
        """A partial state has the layers with a window; the other layers keep everything.  Both orders work."""
        with a_context(windowed, kv_unified=unified, swa_full=False) as context:
            expected = expected_logits(context, 192)
            feed(context, TEXT[:192])
            checkpoint, whole = saved(context, flags=PARTIAL_ONLY), saved(context)
            assert 2 * len(checkpoint) < len(whole)
            feed(context, TEXT[192:900], pos=192)
            if first == "remove":
                context.seq_remove(0, 192)
            context.load_state_from(0, checkpoint, flags=PARTIAL_ONLY)
            if first == "load":
                context.seq_remove(0, 192)
            assert held(context) == (192 - WINDOW, 191)
            assert same_logits(feed(context, NEXT, pos=192), expected)


@UNIFY
class TestHybrid:
    def test_a_tail_cannot_be_removed(self, hybrid: Model, unified: bool) -> None:
        """Not even by one token.  A refused removal changes nothing."""
        with a_context(hybrid, kv_unified=unified) as context:
            expected = expected_logits(context, 300)
            feed(context, TEXT[:300])
            assert held(context) == (299, 299), "its state covers the last position only"
            for start in (299, 192, 1):
                assert not context.seq_remove(0, start)
            assert context.seq_remove(0, 300), "there is nothing to remove"
            assert held(context) == (299, 299)
            assert same_logits(feed(context, NEXT, pos=300), expected)
            for start in (0, -1):
                feed(context, TEXT[:300], seq=1)
                assert context.seq_remove(1, start), "a whole sequence can always be removed"
                assert held(context, 1) == (-1, -1)

    def test_a_saved_state_continues_bit_for_bit(self, hybrid: Model, unified: bool) -> None:
        with a_context(hybrid, kv_unified=unified) as context:
            feed(context, TEXT[:300])
            state = saved(context)
            expected = feed(context, NEXT, pos=300)
            for seq in (2, 0):
                context.load_state_from(seq, state)
                assert held(context, seq) == (299, 299)
                assert same_logits(feed(context, NEXT, pos=300, seq=seq), expected)

    def test_truncation_to_a_checkpoint(self, hybrid: Model, unified: bool) -> None:
        """First load the state, then remove the tail; any number of times."""
        with a_context(hybrid, kv_unified=unified) as context:
            expected = expected_logits(context, 192)
            feed(context, TEXT[:192])
            checkpoint, whole = saved(context, flags=PARTIAL_ONLY), saved(context)
            for _ in range(2):
                feed(context, TEXT[192:300], pos=192)
                assert not context.seq_remove(0, 192), "refused as long as the state is that of the end"
                context.load_state_from(0, checkpoint, flags=PARTIAL_ONLY)
                assert held(context) == (191, 191)
                assert context.seq_remove(0, 192)
                assert same_logits(feed(context, NEXT, pos=192), expected)
                context.load_state_from(0, checkpoint, flags=PARTIAL_ONLY)
                assert context.seq_remove(0, 192)
            assert 40 * len(checkpoint) < len(whole)

    def test_a_tail_that_is_kept_is_seen(self, hybrid: Model, unified: bool) -> None:
        """The state alone is not enough: attention would see the old tail next to the new one."""
        with a_context(hybrid, kv_unified=unified) as context:
            expected = expected_logits(context, 192)
            feed(context, TEXT[:192])
            checkpoint = saved(context, flags=PARTIAL_ONLY)
            feed(context, TEXT[192:300], pos=192)
            context.load_state_from(0, checkpoint, flags=PARTIAL_ONLY)
            assert not same_logits(feed(context, NEXT, pos=192), expected)

    def test_a_partial_state_has_no_attention(self, hybrid: Model, unified: bool) -> None:
        with a_context(hybrid, kv_unified=unified) as context:
            feed(context, TEXT[:192])
            checkpoint = saved(context, flags=PARTIAL_ONLY)
            context.load_state_from(3, checkpoint, flags=PARTIAL_ONLY)
            assert held(context, 3) == (191, -1)
            with pytest.raises(LlamaError, match="refused a state"):
                context.load_state_from(0, checkpoint[:300], flags=PARTIAL_ONLY)
            assert context.seq_pos_max(0) == -1
            assert context.seq_remove(0)

    def test_a_branch_at_a_checkpoint(self, hybrid: Model, unified: bool) -> None:
        """Copy the whole sequence, load the checkpoint, remove the tail; the source continues."""
        with a_context(hybrid, kv_unified=unified) as context:
            expected, continued = expected_logits(context, 192), expected_logits(context, 300)
            feed(context, TEXT[:192])
            checkpoint = saved(context, flags=PARTIAL_ONLY)
            feed(context, TEXT[192:300], pos=192)
            context.seq_copy(0, 1)
            context.load_state_from(1, checkpoint, flags=PARTIAL_ONLY)
            assert context.seq_remove(1, 192)
            assert same_logits(feed(context, NEXT, pos=192, seq=1), expected)
            assert same_logits(feed(context, NEXT, pos=300), continued)

    def test_snapshots_allow_truncation_within_one_decode(self, hybrid: Model, unified: bool) -> None:
        """``n_rs_seq``: by k tokens if the last call had more than k tokens of the sequence, and only once.  With fewer
        tokens the result is True as well, but the state is wrong."""
        with a_context(hybrid, kv_unified=unified, n_rs_seq=4) as context:
            expected = expected_logits(context, 192)
            for back, fed in ((1, 1), (1, 2), (3, 3), (3, 4), (4, 4), (4, 5), (4, 8)):
                start = 192 + back - fed
                feed(context, TEXT[:start])
                feed(context, TEXT[start : start + fed], pos=start)
                assert context.seq_remove(0, 192)
                assert not context.seq_remove(0, 191), "a second time before the next decode"
                assert same_logits(feed(context, NEXT, pos=192), expected) == (fed > back)
                context.clear()
            feed(context, TEXT[:192])
            feed(context, TEXT[192:200], pos=192)
            assert not context.seq_remove(0, 195)


def test_a_partial_copy_has_the_state_of_the_whole_sequence(hybrid: Model) -> None:
    """With unified KV; with per-sequence KV a partial copy is refused."""
    with a_context(hybrid, kv_unified=True) as context:
        feed(context, TEXT[:300])
        context.seq_copy(0, 1, 0, 192)
        assert held(context, 1) == (299, 191), "attention ends at 192, the state at 300"
