"""Tests for the check against llama.h: it passes, and it names every kind of difference."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_abi import LibraryError
from llama_abi.check import check, check_mtmd
from llama_abi.declarations import Declarations, prototypes
from llama_abi.functions import FUNCTIONS
from llama_abi.mtmd_declarations import MTMD_FUNCTIONS
from llama_abi.types import C
from tests.support import samplers

PACKAGE = Path(__file__).parents[2] / "llama_abi"

DRIFTS = {
    "a field inserted": (
        "uint32_t n_ubatch;",
        "uint32_t n_ubatch; uint32_t n_new;",
        "llama_context_params: n_seq_max is not at byte",
    ),
    "two fields of one size swapped": (
        ("bool embeddings;", "bool offload_kqv;"),
        ("bool offload_kqv;", "bool embeddings;"),
        "llama_context_params: embeddings is not at byte",
    ),
    "a field retyped": ("int8_t       *  logits;", "bool         *  logits;", "llama_batch: logits is no int8_t"),
    "an argument added": (
        "LLAMA_API struct llama_sampler * llama_sampler_init_greedy(void);",
        "LLAMA_API struct llama_sampler * llama_sampler_init_greedy(int32_t flags);",
        "conflicting types for .llama_sampler_init_greedy",
    ),
    "an argument retyped": (
        "llama_sampler_init_temp_ext   (float   t,",
        "llama_sampler_init_temp_ext   (double  t,",
        "conflicting types for .llama_sampler_init_temp_ext",
    ),
    "a constness": (
        "LLAMA_API float * llama_get_logits(",
        "LLAMA_API const float * llama_get_logits(",
        "conflicting types for .llama_get_logits",
    ),
    "an enum value": (
        "LLAMA_FLASH_ATTN_TYPE_ENABLED  = 1",
        "LLAMA_FLASH_ATTN_TYPE_ENABLED  = 2",
        "LLAMA_FLASH_ATTN_TYPE_ENABLED is not 1",
    ),
    "a macro's value": ("#define LLAMA_TOKEN_NULL -1", "#define LLAMA_TOKEN_NULL 0", "LLAMA_TOKEN_NULL is not -1"),
    "a callback's type": (
        "typedef bool (*llama_progress_callback)(float progress,",
        "typedef bool (*llama_progress_callback)(double progress,",
        "llama_progress_callback",
    ),
    "a function gone": ("llama_sampler_init_greedy(void);", "llama_sampler_init_gone(void);", None),
}


@pytest.fixture
def copied(headers: Path, tmp_path: Path) -> Path:
    for header in headers.glob("*.h"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    return tmp_path


def test_declarations_agree_with_the_header(headers: Path) -> None:
    verdict = check(headers)
    assert verdict.errors == ()
    assert verdict.warnings == ()


@pytest.mark.parametrize("drift", [name for name, change in DRIFTS.items() if change[2]])
def test_drift_is_named(copied: Path, drift: str) -> None:
    old, new, complaint = DRIFTS[drift]
    header = copied / "llama.h"
    text = header.read_text()
    olds, news = ((old,), (new,)) if isinstance(old, str) else (old, new)
    for number, before in enumerate(olds):
        assert text.count(before) == 1, before
        text = text.replace(before, f"@{number}@")
    for number, after in enumerate(news):
        text = text.replace(f"@{number}@", after)
    header.write_text(text)
    verdict = check(copied)
    assert any(re.search(complaint, line) for line in verdict.errors), verdict.errors


def test_deprecated_functions_are_warned_of(copied: Path) -> None:
    header = copied / "llama.h"
    line = "LLAMA_API struct llama_sampler * llama_sampler_init_greedy(void);"
    header.write_text(header.read_text().replace(line, f'DEPRECATED({line.removesuffix(";")}, "use another");'))
    verdict = check(copied)
    assert verdict.errors == ()
    assert any("llama_sampler_init_greedy" in line for line in verdict.warnings), verdict.warnings


def test_command_says_what_is_wrong(copied: Path, headers: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llama_abi.check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)

    good = run(str(headers))
    assert (good.returncode, good.stderr) == (0, "")
    assert "agrees with" in good.stdout

    header = copied / "llama.h"
    header.write_text(header.read_text().replace("uint32_t n_ubatch;", "int32_t n_ubatch;"))
    bad = run(str(copied))
    assert bad.returncode == 1
    assert "struct llama_context_params: n_ubatch is no uint32_t" in bad.stderr
    assert "edit the lines that the compiler names" in bad.stderr

    none = run(str(PACKAGE))
    assert none.returncode == 1
    assert "run ./build_llama.sh" in none.stderr


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("int n_threads;", "int n_threads; int n_new;", "mtmd_context_params: image_marker is not at byte"),
        ("bool use_gpu;", "int use_gpu;", "mtmd_context_params: use_gpu is no bool"),
        ("void mtmd_free(mtmd_context * ctx)", "int mtmd_free(mtmd_context * ctx)", "conflicting types for .mtmd_free"),
        ("MTMD_INPUT_CHUNK_TYPE_IMAGE,", "MTMD_INPUT_CHUNK_TYPE_IMAGE = 7,", "CHUNK_TYPE_IMAGE is not 1"),
    ],
)
def test_every_difference_of_libmtmd_is_found(copied: Path, before: str, after: str, complaint: str) -> None:
    header = copied / "mtmd.h"
    if not header.exists():
        pytest.skip("the library has no libmtmd: ./build_llama.sh builds it")
    assert check_mtmd(copied).errors == ()
    header.write_text(header.read_text().replace(before, after, 1))
    assert any(re.search(complaint, line) for line in check_mtmd(copied).errors)


def test_no_compiler_is_said(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(LibraryError, match="no C compiler found; install gcc or clang"):
        check(headers)


def test_missing_symbols_are_all_reported_at_once() -> None:
    table = """
        int32_t llama_gone(void);
        size_t strlen(const char * text);
        void llama_gone_too(int32_t n);
    """
    assert Declarations().bind(ctypes.CDLL(None), table) == ["llama_gone", "llama_gone_too"]


def test_every_declared_function_is_used() -> None:
    used = set()
    for path in (*PACKAGE.glob("*.py"), Path(samplers.__file__)):
        used |= set(re.findall(r"\b(?:_?c|_?mtmd|_?library|found)\.((?:llama|ggml|mtmd)_\w+)", path.read_text()))
    declared = {prototype.name for prototype in prototypes(FUNCTIONS + MTMD_FUNCTIONS)}
    assert declared - used == set(), "declared and unused"
    assert used - declared == set(), "used and not declared"


def test_every_declared_value_is_used() -> None:
    text = "".join(path.read_text() for path in PACKAGE.glob("*.py") if path.name != "types.py")
    # These are used as a whole, and not member by member.
    whole = {"ggml_log_level", "ggml_backend_dev_type", "ggml_type", "llama_pooling_type", "llama_split_mode"}
    unused = [
        member for name, members in C.enums.items() if name not in whole for member in members if member not in text
    ]
    assert unused == []


class TestSpellings:
    def test_an_unknown_type_is_refused(self) -> None:
        with pytest.raises(LibraryError, match="no ctypes type for 'int32 \\*'"):
            Declarations().ctype("int32 *")

    def test_opaque_structs_are_distinct_types(self) -> None:
        declarations = Declarations()
        model, context = declarations.ctype("const struct llama_model *"), declarations.ctype("struct llama_context *")
        assert context is declarations.ctype("struct llama_context *")
        with pytest.raises(TypeError):
            context.from_param(model())

    def test_a_struct_by_value_needs_its_fields(self) -> None:
        with pytest.raises(LibraryError, match="no ctypes type"):
            Declarations().ctype("struct llama_batch")

    def test_a_prototype_as_c(self) -> None:
        (found,) = prototypes("const char *   name( const struct x * a,  int32_t n );   // !null")
        assert (found.name, found.rule) == ("name", "!null")
        assert found.c == "const char * name(const struct x * a, int32_t n);"
