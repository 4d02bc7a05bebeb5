"""Tests for contexts: decoding, the lifetime of logits, sequences, states, and invalid arguments.

What is refused here would end the process in C, or answer with a number that says less.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import llama_abi
from llama_abi import (
    AbortFlag,
    Batch,
    Context,
    ContextOptions,
    HandleClosed,
    Library,
    LlamaError,
    Model,
    StaleLogits,
)

PROMPT = [464, 3290, 318, 257, 845, 922, 5044, 13]
OTHER = [40, 1842, 617, 287, 262, 3329]


def decode(context: Context, tokens: list[int], *, pos: int = 0, seq: int = 0) -> npt.NDArray[np.float32]:
    """Decode ``tokens``, and copy the logits of the last one."""
    batch = Batch(64)
    batch.add(tokens, pos=pos, seq=seq)
    assert context.decode(batch) == llama_abi.OK
    return context.logits(1).array[0].copy()


class TestDecode:
    def test_options_reach_the_context(self, context: Context) -> None:
        assert (context.n_ctx, context.n_ctx_seq, context.n_seq_max) == (1024, 256, 4)
        assert (context.n_batch, context.n_ubatch) == (64, 32)
        context.set_threads(2, 1)
        assert (context.n_threads, context.n_threads_batch) == (2, 1)

    def test_batched_equals_alone(self, context: Context) -> None:
        alone = decode(context, PROMPT), decode(context, OTHER, seq=1)
        context.clear()
        batch = Batch(64)
        batch.add(OTHER, pos=0, seq=2)
        batch.add(PROMPT, pos=0, seq=3)
        assert context.decode(batch) == llama_abi.OK
        together = context.logits(2).array
        np.testing.assert_allclose(together[0], alone[1], atol=1e-4)
        np.testing.assert_allclose(together[1], alone[0], atol=1e-4)

    def test_chunked_prefill_equals_whole(self, context: Context) -> None:
        whole = decode(context, PROMPT)
        decode(context, PROMPT[:3], seq=1)
        np.testing.assert_allclose(decode(context, PROMPT[3:], pos=3, seq=1), whole, atol=1e-4)

    def test_quantized_is_nearly_equal(self, library: Library, context: Context, tiny_q8: Path) -> None:
        with Model(library, tiny_q8) as model, Context(model, ContextOptions(n_ctx=512, n_seq_max=4)) as other:
            for tokens in (PROMPT, OTHER, PROMPT[:1]):
                quantized, exact = decode(other, tokens), decode(context, tokens)
                assert np.corrcoef(quantized, exact)[0, 1] > 0.99
                other.clear()
                context.clear()

    @pytest.mark.parametrize("unify", [False, True])
    def test_rows_are_in_batch_order(self, model: Model, unify: bool) -> None:
        # With per-sequence KV llama.cpp computes a mixed batch in another order.
        with Context(
            model, ContextOptions(n_ctx=512, n_batch=64, n_ubatch=8, n_seq_max=4, kv_unified=unify)
        ) as context:
            alone = [decode(context, tokens) for tokens in (PROMPT, OTHER, PROMPT[:5]) if context.seq_remove(0)]
            context.seq_remove(0)
            for seq, tokens in ((1, OTHER), (2, PROMPT[:5])):
                decode(context, tokens[:-1], seq=seq)
            batch = Batch(64)
            batch.add(OTHER[-1:], pos=len(OTHER) - 1, seq=1)
            batch.add(PROMPT, pos=0, seq=0)
            batch.add(PROMPT[4:5], pos=4, seq=2)
            assert context.decode(batch) == llama_abi.OK
            rows = context.logits().array
            assert rows.shape == (3, model.vocab.n_tokens)
            for row, expected in zip(rows, (alone[1], alone[0], alone[2]), strict=True):
                np.testing.assert_allclose(row, expected, atol=1e-4)

    def test_no_kv_slot(self, context: Context) -> None:
        batch = Batch(64)
        for start in range(0, 256, 64):
            batch.clear()
            batch.add([1] * 64, pos=start, seq=0, logits="none")
            assert context.decode(batch) == llama_abi.OK
        batch.clear()
        batch.add([1], pos=256, seq=0)
        assert context.decode(batch) == llama_abi.NO_KV_SLOT
        assert context.seq_pos_max(0) == 255
        with pytest.raises(LlamaError, match="returned 0 rows"):
            context.logits(1)
        decode(context, PROMPT, seq=1)

    def test_invalid_batches_do_not_reach_c(self, context: Context) -> None:
        batch = Batch(100)
        with pytest.raises(LlamaError, match="takes 1 to 64 tokens, not 0"):
            context.decode(batch)
        batch.add([1] * 65, pos=0, seq=0)
        with pytest.raises(LlamaError, match="takes 1 to 64 tokens, not 65"):
            context.decode(batch)
        batch.clear()
        batch.add([1], pos=0, seq=4)
        with pytest.raises(LlamaError, match=r"sequence 4 is not in \[0, 4\)"):
            context.decode(batch)
        decode(context, PROMPT)

    def test_invalid_batches_that_c_refuses(self, context: Context, model: Model) -> None:
        batch = Batch(8)
        batch.add([model.vocab.n_tokens], pos=0, seq=0)
        with pytest.raises(LlamaError, match=r"returned -1: .*invalid token") as caught:
            context.decode(batch)
        assert caught.value.code == -1
        decode(context, PROMPT)
        batch.clear()
        batch.add([1], pos=99, seq=0)
        with pytest.raises(LlamaError, match="consecutive"):
            context.decode(batch)
        assert context.seq_pos_max(0) == len(PROMPT) - 1

    def test_abort(self, context: Context) -> None:
        flag = AbortFlag()
        context.set_abort_flag(flag)
        decode(context, PROMPT)
        flag.set()
        assert flag.is_set()
        batch = Batch(64)
        batch.add(OTHER, pos=0, seq=1)
        assert context.decode(batch) == llama_abi.ABORTED
        assert context.seq_pos_max(1) == -1
        with pytest.raises(LlamaError, match="returned 0 rows"):
            context.logits(1)
        flag.clear()
        decode(context, OTHER, seq=1)
        context.set_abort_flag(None)
        flag.set()
        decode(context, OTHER, seq=2)

    def test_abort_from_another_thread(self, model: Model) -> None:
        with Context(model, ContextOptions(n_ctx=2048, n_batch=2048, n_ubatch=64)) as context:
            flag = AbortFlag()
            context.set_abort_flag(flag)
            batch = Batch(2048)
            batch.add([1] * 2000, pos=0, seq=0)
            timer = threading.Timer(0.01, flag.set)
            timer.start()
            code = context.decode(batch)
            timer.join()
            assert code == llama_abi.ABORTED
            kept = context.seq_pos_max(0) + 1
            assert kept % 64 == 0
            assert kept < 2000
            context.clear()
            flag.clear()
            assert context.decode(batch) == llama_abi.OK

    def test_other_threads_run_during_a_decode(self, model: Model) -> None:
        with Context(model, ContextOptions(n_ctx=2048, n_batch=2048, n_ubatch=2048)) as context:
            batch = Batch(2048)
            batch.add([1] * 2000, pos=0, seq=0)
            closing: list[str] = []
            done = threading.Event()

            def try_to_close() -> None:
                while not done.wait(0.001):
                    try:
                        context.close()
                    except LlamaError as error:
                        closing.append(str(error))
                        return

            started = threading.Thread(target=try_to_close)
            context._resource.busy = True  # the other thread must not be first
            started.start()
            assert context.decode(batch) == llama_abi.OK
            done.set()
            started.join()
            assert closing == ["this Context is computing; close it when that call has returned"]


class TestLogits:
    def test_the_next_decode_makes_a_view_stale(self, context: Context) -> None:
        decode(context, PROMPT)
        view = context.logits(1)
        assert (view.rows, len(view), view.stale) == (1, 1, False)
        assert view.array.dtype == np.float32
        decode(context, OTHER, seq=1)
        assert view.stale
        with pytest.raises(StaleLogits, match="decoded again"):
            _ = view.array

    def test_a_failed_decode_makes_a_view_stale(self, context: Context) -> None:
        decode(context, PROMPT)
        view = context.logits(1)
        batch = Batch(1)
        batch.add([1], pos=99, seq=0)
        with pytest.raises(LlamaError):
            context.decode(batch)
        assert view.stale

    def test_closing_makes_a_view_stale(self, model: Model) -> None:
        context = Context(model, ContextOptions(n_ctx=256))
        decode(context, PROMPT)
        view = context.logits(1)
        context.close()
        with pytest.raises(StaleLogits, match="closed"):
            _ = view.array

    def test_no_copy(self, context: Context) -> None:
        decode(context, PROMPT)
        context.logits(1).array[0, 5] = 1e9
        assert context.logits(1).array.argmax() == 5

    def test_rows(self, context: Context) -> None:
        batch = Batch(64)
        batch.add(PROMPT, pos=0, seq=0, logits="all")
        context.decode(batch)
        assert context.logits().rows == len(PROMPT)
        assert context.logits(3).array.shape[0] == 3
        assert context.logits(0).array.shape[0] == 0
        for rows in (-1, len(PROMPT) + 1):
            with pytest.raises(LlamaError, match=f"returned {len(PROMPT)} rows"):
                context.logits(rows)

    def test_no_logits_before_a_decode(self, context: Context) -> None:
        with pytest.raises(LlamaError, match="returned 0 rows"):
            context.logits(1)


class TestSequences:
    def test_positions(self, context: Context) -> None:
        assert (context.seq_pos_min(0), context.seq_pos_max(0)) == (-1, -1)
        decode(context, PROMPT)
        assert (context.seq_pos_min(0), context.seq_pos_max(0)) == (0, 7)
        assert context.seq_remove(0, 5)
        assert context.seq_pos_max(0) == 4
        assert context.seq_remove(0)
        assert context.seq_pos_max(0) == -1

    def test_truncated_tokens_leave_no_trace(self, context: Context) -> None:
        whole = decode(context, PROMPT)
        context.seq_remove(0, 4)
        decode(context, OTHER, pos=4)
        context.seq_remove(0, 4)
        np.testing.assert_allclose(decode(context, PROMPT[4:], pos=4), whole, atol=1e-4)

    @pytest.mark.parametrize("unify", [False, True])
    def test_a_copy_equals_a_replay(self, request: pytest.FixtureRequest, unify: bool) -> None:
        context: Context = request.getfixturevalue("unified" if unify else "context")
        expected = decode(context, PROMPT + OTHER, seq=3)
        decode(context, PROMPT)
        context.seq_copy(0, 1)
        assert context.seq_pos_max(1) == context.seq_pos_max(0)
        np.testing.assert_allclose(decode(context, OTHER, pos=len(PROMPT), seq=1), expected, atol=1e-4)

    def test_a_part_can_be_copied_with_unified_kv(self, unified: Context) -> None:
        decode(unified, PROMPT)
        unified.seq_copy(0, 1, 0, 5)
        assert unified.seq_pos_max(1) == 4

    def test_a_part_cannot_be_copied_with_per_sequence_kv(self, context: Context) -> None:
        decode(context, PROMPT)
        for p0, p1 in ((0, 5), (2, -1), (1, 3)):
            with pytest.raises(LlamaError, match="can only be copied whole"):
                context.seq_copy(0, 1, p0, p1)
        context.seq_copy(0, 1, 0, len(PROMPT))  # bounds that include the whole sequence
        assert context.seq_pos_max(1) == 7

    @pytest.mark.parametrize("unify", [False, True])
    def test_keep_and_clear(self, request: pytest.FixtureRequest, unify: bool) -> None:
        context: Context = request.getfixturevalue("unified" if unify else "context")
        for seq in range(3):
            decode(context, PROMPT, seq=seq)
        context.seq_keep(1)
        assert [context.seq_pos_max(seq) for seq in range(3)] == [-1, 7, -1]
        context.clear(data=True)
        assert context.seq_pos_max(1) == -1

    def test_shift(self, context: Context) -> None:
        decode(context, PROMPT)
        assert context.can_shift
        context.seq_remove(0, 0, 2)
        context.seq_add(0, 2, -1, -2)
        assert (context.seq_pos_min(0), context.seq_pos_max(0)) == (0, 5)
        decode(context, OTHER, pos=6)
        for delta in (-3, 2**31, -(2**40)):
            with pytest.raises(LlamaError, match="out of bounds"):
                context.seq_add(0, 2, -1, delta)

    @pytest.mark.parametrize("seq", [-1, 4, 256, 2**31, -(2**40)])
    def test_out_of_range(self, context: Context, seq: int) -> None:
        for use in (
            lambda: context.seq_remove(seq),
            lambda: context.seq_copy(0, seq),
            lambda: context.seq_copy(seq, 0),
            lambda: context.seq_keep(seq),
            lambda: context.seq_add(seq, 0, -1, 1),
            lambda: context.seq_pos_min(seq),
            lambda: context.seq_pos_max(seq),
            lambda: context.state_size(seq),
            lambda: context.save_state_into(seq, bytearray(9)),
            lambda: context.load_state_from(seq, b"123456789"),
        ):
            with pytest.raises(LlamaError, match=r"is not in \[0, 4\)"):
                use()
        with pytest.raises(LlamaError, match="out of bounds"):
            context.seq_remove(0, 2**31)


class TestState:
    @pytest.mark.parametrize("unify", [False, True])
    def test_a_restored_sequence_continues_exactly(self, request: pytest.FixtureRequest, unify: bool) -> None:
        context: Context = request.getfixturevalue("unified" if unify else "context")
        decode(context, PROMPT)
        buffer = bytearray(context.state_size(0))
        assert context.save_state_into(0, buffer) == len(buffer)
        expected = decode(context, OTHER, pos=len(PROMPT))
        context.clear(data=True)
        assert context.load_state_from(2, buffer) == len(buffer)
        assert context.seq_pos_max(2) == 7
        assert (decode(context, OTHER, pos=len(PROMPT), seq=2) == expected).all()

    def test_buffers(self, context: Context) -> None:
        decode(context, PROMPT)
        size = context.state_size(0)
        with mmap.mmap(-1, size + 4096) as mapped:
            assert context.save_state_into(0, mapped) == size
            assert context.load_state_from(1, mapped[:size]) == size
        array = np.zeros(size, np.uint8)
        assert context.save_state_into(0, array) == size
        assert context.load_state_from(1, memoryview(array)) == size

    def test_refused(self, context: Context) -> None:
        decode(context, PROMPT)
        size = context.state_size(0)
        buffer = bytearray(size)
        context.save_state_into(0, buffer)
        with pytest.raises(LlamaError, match=f"needs {size} bytes, the buffer has {size - 1}"):
            context.save_state_into(0, bytearray(size - 1))
        with pytest.raises(LlamaError, match="not writable"):
            context.save_state_into(0, bytes(size))
        with pytest.raises(LlamaError, match="a state needs"):
            context.save_state_into(0, "text")
        with pytest.raises(LlamaError, match="a state needs"):
            context.load_state_from(1, None)
        with pytest.raises(LlamaError, match="unknown state flags"):
            context.state_size(0, flags=2)
        for broken in (b"", bytes(buffer[: size // 2]), bytes(size), b"\xff" * 64):
            with pytest.raises(LlamaError, match=r"refused a state|needs a buffer"):
                context.load_state_from(1, broken)
            assert context.seq_pos_max(1) == -1
        assert context.seq_pos_max(0) == 7

    def test_the_next_decode_makes_a_copy(self, context: Context) -> None:
        decode(context, PROMPT)
        buffer = bytearray(context.state_size(0))
        context.save_state_into(0, buffer)
        context.seq_copy(0, 1)
        with pytest.raises(LlamaError, match="the target of a copy"):
            context.save_state_into(1, bytearray(len(buffer)))
        with pytest.raises(LlamaError, match="is the source of a copy"):
            context.load_state_from(0, buffer)
        decode(context, OTHER, seq=2)
        copied = bytearray(context.state_size(1))
        context.save_state_into(1, copied)
        context.load_state_from(0, buffer)
        assert len(copied) == len(buffer)

    def test_a_queued_copy_does_not_overwrite_a_loaded_state(self, context: Context) -> None:
        """Loading is refused until the next decode has made the copy, whatever happened to the sequence in between."""
        decode(context, OTHER)
        buffer = bytearray(context.state_size(0))
        context.save_state_into(0, buffer)
        expected = decode(context, PROMPT, pos=len(OTHER))
        for since in (lambda: None, lambda: context.seq_remove(1), context.clear):
            decode(context, PROMPT, seq=2)
            context.seq_copy(2, 1)
            since()
            with pytest.raises(LlamaError, match="the target of a copy"):
                context.load_state_from(1, buffer)
            decode(context, PROMPT, seq=3)
            context.load_state_from(1, buffer)
            assert (decode(context, PROMPT, pos=len(OTHER), seq=1) == expected).all()
            context.clear()

    @pytest.mark.parametrize("unify", [False, True])
    def test_an_empty_state_removes_the_sequence(self, request: pytest.FixtureRequest, unify: bool) -> None:
        context: Context = request.getfixturevalue("unified" if unify else "context")
        empty = bytearray(context.state_size(0))
        context.save_state_into(0, empty)
        for state in (empty, b"broken"):
            decode(context, PROMPT, seq=1)
            try:
                context.load_state_from(1, state)
            except LlamaError:
                assert state == b"broken"
            assert context.seq_pos_max(1) == -1

    def test_partial_only_is_the_whole_state_of_a_plain_model(self, context: Context) -> None:
        decode(context, PROMPT)
        buffer = bytearray(context.state_size(0, flags=llama_abi.PARTIAL_ONLY))
        assert len(buffer) == context.state_size(0)
        context.save_state_into(0, buffer, flags=llama_abi.PARTIAL_ONLY)
        assert context.load_state_from(1, buffer, flags=llama_abi.PARTIAL_ONLY) == len(buffer)


class TestContext:
    def test_closed(self, model: Model) -> None:
        context = Context(model, ContextOptions(n_ctx=256))
        context.close()
        context.close()
        batch = Batch(1)
        batch.add([1], pos=0, seq=0)
        for use in (
            lambda: context.decode(batch),
            lambda: context.synchronize(),
            lambda: context.logits(0),
            lambda: context.seq_pos_max(0),
            lambda: context.clear(),
            lambda: context.state_size(0),
            lambda: context.set_threads(1, 1),
            lambda: context.set_abort_flag(None),
        ):
            with pytest.raises(HandleClosed, match="this Context is closed"):
                use()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"n_ctx": -1},
            {"n_ctx": 2**32},
            {"n_batch": 0},
            {"n_ubatch": 0},
            {"n_seq_max": 0},
            {"n_threads": 0},
            {"n_threads": 1.5},
            {"type_k": "q2"},
            {"flash_attn": "maybe"},
        ],
    )
    def test_options_have_bounds(self, wrong: dict[str, object]) -> None:
        with pytest.raises((ValueError, TypeError)):
            ContextOptions(**wrong)  # type: ignore[arg-type]

    def test_too_many_sequences(self, model: Model) -> None:
        with pytest.raises(LlamaError, match="at most 256 sequences"):
            Context(model, ContextOptions(n_ctx=256, n_seq_max=257))

    def test_errors_include_those_of_llama_cpp(self, model: Model) -> None:
        with pytest.raises(LlamaError, match=r"cannot create a context: .*V cache"):
            Context(model, ContextOptions(n_ctx=256, type_v="q8_0", flash_attn="off"))

    def test_more_outputs_than_reserved(self, model: Model) -> None:
        with Context(model, ContextOptions(n_ctx=256, n_batch=64, n_outputs_max=4, n_seq_max=4)) as context:
            batch = Batch(64)
            batch.add(PROMPT, pos=0, seq=0, logits="all")
            with pytest.raises(LlamaError, match="8 tokens need logits, and n_outputs_max is 4"):
                context.decode(batch)

    def test_threads(self, context: Context) -> None:
        for wrong in ((0, 1), (1, 0), (-1, 1), (1, 513)):
            with pytest.raises(LlamaError, match="1 to 512"):
                context.set_threads(*wrong)

    def test_contexts_leak_no_memory(self, model: Model) -> None:
        for _ in range(20):
            with Context(model, ContextOptions(n_ctx=256, n_seq_max=2)) as context:
                decode(context, PROMPT)
        assert model._resource.children == 0


class TestEmbeddings:
    def options(self, pooling: str) -> ContextOptions:
        return ContextOptions(
            n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=2, kv_unified=True, embeddings=True, pooling=pooling
        )

    def decoded(self, context: Context) -> None:
        batch = Batch(64)
        batch.add(PROMPT, pos=0, seq=0, logits="all")
        batch.add(OTHER, pos=0, seq=1, logits="all")
        assert context.decode(batch) == llama_abi.OK

    def test_pooled_by_llama_cpp_and_by_hand(self, model: Model) -> None:
        with Context(model, self.options("none")) as context:
            self.decoded(context)
            rows = context.embeddings()
        assert rows.shape == (len(PROMPT) + len(OTHER), model.n_embd_out)
        first, second = rows[: len(PROMPT)], rows[len(PROMPT) :]
        for pooling, expected in (
            ("mean", (first.mean(axis=0), second.mean(axis=0))),
            ("cls", (first[0], second[0])),
            ("last", (first[-1], second[-1])),
        ):
            with Context(model, self.options(pooling)) as context:
                self.decoded(context)
                for seq in (0, 1):
                    np.testing.assert_allclose(context.pooled_embedding(seq), expected[seq], atol=1e-4)

    def test_there_are_none_without_the_options(self, context: Context, model: Model) -> None:
        decode(context, PROMPT)
        with pytest.raises(LlamaError, match="no embeddings"):
            context.embeddings()
        with Context(model, self.options("none")) as tokens:
            with pytest.raises(LlamaError, match="no embeddings"):
                tokens.embeddings()
            self.decoded(tokens)
            with pytest.raises(LlamaError):
                tokens.pooled_embedding(0)
