"""``uma-trio serve`` when the engine process dies while it loads the model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import aborting_engine
from uma_trio.cli.serve import command
from uma_trio.daemon import server
from uma_trio.daemon.engines.link import EngineLink, ProcessLauncher
from uma_trio.engine_link.load_errors import ModelError, explained, readable
from uma_trio.engine_link.messages import EngineDied
from uma_trio.models.packaged import EMBEDDED


class CountingLauncher(ProcessLauncher):
    """Starts engines that abort, and counts them."""

    n_started = 0

    def launch(self, model: str) -> EngineLink:
        CountingLauncher.n_started += 1
        return super().launch(model)


@pytest.fixture
def aborting(monkeypatch):
    """Make ``serve`` start an engine that aborts."""
    CountingLauncher.n_started = 0
    for name in [name for name in os.environ if name.startswith("UMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        server,
        "make_launcher",
        lambda config, nursery, first: CountingLauncher(nursery, "tests.support.aborting_engine"),
    )


def test_a_model_on_which_the_library_aborts_is_one_sentence_and_exit_code_1(aborting, tmp_path):
    path = tmp_path / "s"
    result = CliRunner().invoke(command, ["--socket", str(path), "--log-level", "error"])
    assert result.exit_code == 1
    assert result.output == (
        f"uma-trio serve: cannot load {EMBEDDED}: the engine process was ended by SIGABRT: {aborting_engine.ASSERTION}; "
        "llama.cpp cannot serve this file: get the file from another source, or convert the model again\n"
    )
    assert CountingLauncher.n_started == 1
    assert not path.exists()


def test_the_log_has_the_lines_of_the_library_and_no_traceback(aborting, tmp_path):
    result = CliRunner().invoke(command, ["--socket", str(tmp_path / "s"), "--log-format", "json"])
    events = [json.loads(line)["event"] for line in result.output.splitlines() if line.startswith("{")]
    assert aborting_engine.ASSERTION in events
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            "llama_model_load: error loading model: unable to allocate CUDA0 buffer; "
            "llama_model_load_from_file_impl: failed to load model",
            "the weights do not fit into memory; take a smaller model",
        ),
        (
            "cannot create a context: ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9; "
            "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
            "the context does not fit into memory; lower --ctx",
        ),
        (
            "cannot create a context: llama_init_from_model: V cache quantization requires flash_attn",
            "llama.cpp refuses these settings (V cache quantization requires flash_attn); change those of the section",
        ),
        (
            "llama_model_load: error loading model vocabulary: cannot find tokenizer merges in model file; "
            "llama_model_load_from_file_impl: failed to load model",
            "llama.cpp refuses the file (cannot find tokenizer merges in model file); get the file from another source",
        ),
        (
            "llama_model_load: error loading model: LLAMA_SPLIT_MODE_TENSOR not implemented for architecture 'mamba'; "
            "llama_model_load_from_file_impl: failed to load model",
            "llama.cpp cannot divide layers of the architecture 'mamba' between devices; set split_mode to layer",
        ),
        ("llama_x: failed to load model", "llama.cpp refuses the file (failed to load model); get the file"),
        ("kv_mem_limit_mb 1 has room for 2 tokens: raise it", "kv_mem_limit_mb 1 has room for 2 tokens: raise it"),
    ],
)
def test_the_lines_of_llama_cpp_become_one_reason_with_a_remedy(reason, shown):
    assert "; ".join(readable(reason)).startswith(shown)


@pytest.mark.parametrize(
    ("signal", "remedy"), [("SIGKILL", "lower --ctx"), ("SIGILL", "build_llama"), ("SIGHUP", "log")]
)
def test_the_end_of_an_engine_that_loads_has_a_remedy(signal, remedy):
    message = f"cannot load m.gguf: the engine process was ended by {signal}; .*{remedy}"
    with pytest.raises(ModelError, match=message), explained(Path("m.gguf")):
        raise EngineDied(f"the engine process was ended by {signal}")
