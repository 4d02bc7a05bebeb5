"""Tests for models and vocabularies: their properties, and invalid arguments."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import llama_abi
from llama_abi import (
    Context,
    ContextOptions,
    HandleClosed,
    Library,
    LlamaError,
    Model,
    TokenAttr,
    TooManyTokens,
    Vocab,
)

AnyVocab = Callable[[str], Vocab]
SPECIAL = ("add_special", "parse_special")


class TestModel:
    def test_properties(self, model: Model) -> None:
        assert (model.n_layer, model.n_embd, model.n_head, model.n_head_kv) == (2, 64, 4, 2)
        assert (model.n_ctx_train, model.n_swa) == (2048, 0)
        assert 3_000_000 < model.n_params < 4_000_000
        assert 4 * model.n_params <= model.size_bytes < 5 * model.n_params
        assert (model.is_recurrent, model.is_hybrid, model.has_encoder, model.has_decoder) == (
            False,
            False,
            False,
            True,
        )
        assert "llama" in model.description
        assert model.chat_template == "{{ messages }}"

    def test_metadata(self, model: Model) -> None:
        assert model.meta("general.name") == "tiny"
        assert model.meta("llama.block_count") == "2"
        assert model.meta("absent") is None
        assert model.meta("a\0b") is None
        assert model.metadata()["general.architecture"] == "llama"
        assert len(model.metadata()["tokenizer.chat_template"]) > 0

    def test_progress(self, library: Library, tiny: Path) -> None:
        seen: list[float] = []
        Model(library, tiny, on_progress=seen.append).close()
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (0.0, 1.0)

    def test_progress_can_stop(self, library: Library, tiny: Path) -> None:
        with pytest.raises(LlamaError, match="was stopped"):
            Model(library, tiny, on_progress=lambda progress: False)

    def test_an_exception_in_progress_is_passed_on(self, library: Library, tiny: Path) -> None:
        def fail(progress: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Model(library, tiny, on_progress=fail)

    def test_no_file(self, library: Library, tmp_path: Path) -> None:
        with pytest.raises(LlamaError, match="there is no file"):
            Model(library, tmp_path / "absent.gguf")
        with pytest.raises(LlamaError, match="NUL"):
            Model(library, "a\0b")

    def test_not_a_model(self, library: Library, tmp_path: Path, tiny: Path) -> None:
        (tmp_path / "text").write_text("not a model")
        with pytest.raises(LlamaError, match="invalid magic"):
            Model(library, tmp_path / "text")
        (tmp_path / "half").write_bytes(tiny.read_bytes()[:-100_000])
        with pytest.raises(LlamaError, match=r"cannot load .*half: \w"):
            Model(library, tmp_path / "half")

    def test_closed(self, library: Library, tiny: Path) -> None:
        model = Model(library, tiny)
        model.close()
        model.close()
        assert model.closed
        for use in (lambda: model.description, lambda: model.vocab.token_to_bytes(1), lambda: model.vocab.bos):
            with pytest.raises(HandleClosed, match="this Model is closed"):
                use()

    def test_a_context_keeps_its_model_open(self, library: Library, tiny: Path) -> None:
        model = Model(library, tiny)
        context = Context(model, ContextOptions(n_ctx=256))
        with pytest.raises(LlamaError, match="close what was made from it first"):
            model.close()
        context.close()
        model.close()

    def test_garbage_is_freed_in_order(self, library: Library, tiny: Path) -> None:
        model = Model(library, tiny)
        held = model._resource
        context = Context(model, ContextOptions(n_ctx=256))
        del model
        gc.collect()
        assert not held.released
        context.knot = context  # type: ignore[attr-defined]
        del context
        gc.collect()
        assert held.released
        assert held.children == 0

    def test_vocab_only_has_no_context(self, vocab: AnyVocab) -> None:
        with pytest.raises(LlamaError, match="without its weights"):
            Context(vocab("gpt-2")._model, ContextOptions(n_ctx=256))


@attrs.frozen
class Watched:
    """The functions of the library; says when a thread is in ``llama_tokenize``, and notes what it has returned."""

    c: Any
    begun: threading.Event = attrs.field(factory=threading.Event)
    found: list[int] = attrs.field(factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.c, name)

    def llama_tokenize(self, *arguments: Any) -> int:
        self.begun.set()
        n: int = self.c.llama_tokenize(*arguments)
        self.found.append(n)
        return n


def test_a_model_is_closed_after_the_calls_of_other_threads(library: Library, vocabularies: Path) -> None:
    model = Model(library, vocabularies / "ggml-vocab-gpt-2.gguf", vocab_only=True)
    model.vocab._c = watched = Watched(library.c)
    text = "fox " * 200_000  # takes about 300 ms
    call = threading.Thread(target=model.vocab.tokenize, args=(text,), kwargs=dict.fromkeys(SPECIAL, False))
    call.start()
    watched.begun.wait()
    model.close()
    assert watched.found == [200_001]
    call.join()
    with pytest.raises(HandleClosed, match="this Model is closed"):
        model.vocab.tokenize("fox", **dict.fromkeys(SPECIAL, False))


class TestTokenBytes:
    @pytest.mark.parametrize("name", ["llama-bpe", "gpt-2", "qwen2"])
    def test_the_bytes_of_tokens_join_to_the_text(self, vocab: AnyVocab, vocabularies: Path, name: str) -> None:
        text = (vocabularies / f"ggml-vocab-{name}.gguf.inp").read_bytes()
        tokens = vocab(name).tokenize(text, add_special=False, parse_special=False)
        assert b"".join(vocab(name).token_to_bytes(int(token)) for token in tokens) == text


class TestVocab:
    def test_special_tokens(self, vocab: AnyVocab) -> None:
        spm = vocab("llama-spm")
        assert (spm.n_tokens, spm.bos, spm.eos, spm.eot) == (32000, 1, 2, None)
        assert (spm.add_bos, spm.add_eos) == (True, False)
        assert spm.eog_ids == (2,)
        assert spm.is_eog(2)
        assert not spm.is_eog(3)
        assert spm.is_control(1)
        assert spm.tokenize("", add_special=True, parse_special=False).tolist() == [1]
        assert vocab("llama-bpe").token_to_id("<|eot_id|>") in vocab("llama-bpe").eog_ids

    def test_special_text_is_text_by_default(self, vocab: AnyVocab) -> None:
        spm = vocab("llama-spm")
        assert spm.tokenize("</s>", add_special=False, parse_special=True).tolist() == [2]
        assert 2 not in spm.tokenize("</s>", add_special=False, parse_special=False)
        assert spm.token_to_bytes(2) == b""
        assert spm.token_to_bytes(2, special=True) == b"</s>"

    def test_nul_and_broken_utf8(self, vocab: AnyVocab) -> None:
        for name in ("llama-spm", "gpt-2", "qwen2", "bert-bge"):
            chosen = vocab(name)
            assert len(chosen.tokenize(b"a\0b", add_special=False, parse_special=False)) > 0
            for broken in (b"\xff\xfe", b"\xe2\x82", b"a\xf0\x9f\x98", b"\x80" * 50):
                chosen.tokenize(broken, add_special=False, parse_special=False)
        assert (
            vocab("gpt-2").detokenize(vocab("gpt-2").tokenize(b"a\0b", add_special=False, parse_special=False))
            == b"a\0b"
        )

    def test_text_that_is_not_unicode(self, vocab: AnyVocab) -> None:
        with pytest.raises(LlamaError, match="not Unicode"):
            vocab("gpt-2").tokenize("\ud800", add_special=False, parse_special=False)

    def test_limit(self, vocab: AnyVocab) -> None:
        gpt = vocab("gpt-2")
        text = "one two three four"
        assert len(gpt.tokenize(text, add_special=False, parse_special=False, limit=4)) == 4
        for limit in (3, 0, -1):
            with pytest.raises(TooManyTokens) as caught:
                gpt.tokenize(text, add_special=False, parse_special=False, limit=limit)
            assert caught.value.n_tokens == 4
        assert gpt.tokenize("", add_special=False, parse_special=False, limit=0).tolist() == []

    def test_more_tokens_than_bytes(self, vocab: AnyVocab) -> None:
        # Normalisation splits this ligature into many characters; the second call has enough room for them.
        text = "\ufdfa" * 200
        for name in ("bert-bge", "llama-spm", "qwen2"):
            assert len(vocab(name).tokenize(text, add_special=True, parse_special=False)) > 0

    def test_ids_out_of_range(self, vocab: AnyVocab) -> None:
        gpt = vocab("gpt-2")
        for wrong in (-1, gpt.n_tokens, 2**31 - 1, -(2**31), 2**40):
            for use in (gpt.token_to_bytes, gpt.is_eog, gpt.is_control, gpt.attributes):
                with pytest.raises(LlamaError, match=r"is not in \[0, 50257\)"):
                    use(wrong)
        for wrong_ids in ([-1], [1, gpt.n_tokens]):
            with pytest.raises(LlamaError, match="is not in"):
                gpt.detokenize(wrong_ids)
        with pytest.raises(LlamaError, match="one dimension"):
            gpt.detokenize(np.zeros((2, 2), np.int32))

    def test_all_token_bytes(self, vocab: AnyVocab) -> None:
        gpt = vocab("gpt-2")
        found = gpt.tokens_to_bytes(special=True)
        assert len(found) == gpt.n_tokens
        assert all(found[token] == gpt.token_to_bytes(token, special=True) for token in range(0, gpt.n_tokens, 997))
        assert found[50256] == b"<|endoftext|>"

    def test_attributes(self, vocab: AnyVocab) -> None:
        phi, spm = vocab("phi-3"), vocab("llama-spm")
        ends_turn = phi.attributes(phi.token_to_id("<|end|>") or 0)
        assert TokenAttr.CONTROL in ends_turn
        assert TokenAttr.RSTRIP in ends_turn
        assert TokenAttr.RSTRIP not in phi.attributes(1)
        assert TokenAttr.UNKNOWN in spm.attributes(0)
        assert TokenAttr.CONTROL in spm.attributes(1)
        assert not spm.attributes(5000) & (TokenAttr.CONTROL | TokenAttr.UNKNOWN | TokenAttr.USER_DEFINED)
        for each in (phi, spm):
            some = [*range(0, each.n_tokens, 997), each.n_tokens - 1]
            found = each.all_attributes()
            assert len(found) == each.n_tokens
            assert [found[token] for token in some] == [each.attributes(token) for token in some]

    def test_token_to_id(self, vocab: AnyVocab) -> None:
        gpt = vocab("gpt-2")
        assert gpt.token_to_id("<|endoftext|>") == 50256
        assert gpt.token_to_id("Hello") == gpt.tokenize("Hello", add_special=False, parse_special=False)[0]
        assert gpt.token_to_id("two words") is None
        assert gpt.token_to_id("") is None

    def test_the_caller_owns_the_array(self, vocab: AnyVocab) -> None:
        first = vocab("gpt-2").tokenize("one two", add_special=False, parse_special=False)
        kept = first.copy()
        vocab("gpt-2").tokenize("three four", add_special=False, parse_special=False)
        assert (first == kept).all()
        assert first.dtype == np.int32


def test_public_names_exist() -> None:
    assert sorted(llama_abi.__all__) == sorted(set(llama_abi.__all__))
    assert all(hasattr(llama_abi, name) for name in llama_abi.__all__)
