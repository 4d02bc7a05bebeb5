"""Tests for loading the library: its stamp, its defaults, its properties and its log."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llama_abi
from llama_abi import LibraryError, Stamp, locations
from llama_abi import library as libraries
from llama_abi import stamp as stamps
from llama_abi.check import check_again
from llama_abi.locations import DIRECTORY_VARIABLE


@pytest.fixture
def copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "lib"))


def edit(directory: Path, **fields: object) -> None:
    path = directory / locations.STAMP
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(directory: Path) -> str:
    with pytest.raises(LibraryError) as caught:
        Stamp.read(directory).verify(directory)
    assert "run ./build_llama.sh" in str(caught.value)
    return str(caught.value)


class TestStamp:
    def test_a_fresh_copy_is_accepted(self, copied: Path) -> None:
        stamp = Stamp.read(copied)
        stamp.verify(copied)
        assert "libllama" in "".join(stamp.libraries)

    def test_no_library(self, tmp_path: Path) -> None:
        assert "there is no library in" in refused(tmp_path / "absent")
        assert "; correct the path, or run ./build_llama.sh --prefix" in refused(tmp_path)
        (tmp_path / "file").touch()
        assert "is a file; give the folder of a library" in refused(tmp_path / "file")

    def test_no_stamp(self, copied: Path) -> None:
        (copied / locations.STAMP).unlink()
        assert "has no stamp.json" in refused(copied)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"pin": 1}', "\0"])
    def test_unreadable(self, copied: Path, text: str) -> None:
        (copied / locations.STAMP).write_text(text)
        assert "is not readable" in refused(copied)

    def test_nesting_without_end(self, copied: Path) -> None:
        (copied / locations.STAMP).write_text("[" * 100_000)
        assert "is not readable" in refused(copied)

    @pytest.mark.parametrize(
        "fields",
        [{"pin": 5}, {"pin": "x\nline"}, {"pin": "zzz", "backend": "cpu; ls"}, {"options": "abc"}, {"options": [1]}],
        ids=str,
    )
    def test_values_that_nothing_writes(self, copied: Path, fields: dict[str, object]) -> None:
        """The remedy is pasted into a shell, so it has no text that only the file vouches for."""
        edit(copied, **fields)
        assert "is not readable" in refused(copied)

    def test_a_stamp_that_never_ends(self, copied: Path) -> None:
        path = copied / locations.STAMP
        path.write_bytes(b" " * (stamps.MAX_STAMP + 1))
        assert "more than" in refused(copied)
        path.unlink()
        os.mkfifo(path)
        assert "no regular file" in refused(copied)
        path.unlink()
        path.symlink_to("/dev/zero")
        assert "no regular file" in refused(copied)

    def test_what_is_no_file_is_no_part_of_a_library(self, copied: Path) -> None:
        (copied / "libother.so").symlink_to("/nowhere")
        (copied / "include" / "folder.h").mkdir()
        os.mkfifo(copied / "include" / "pipe.h")
        Stamp.read(copied).verify(copied)

    def test_a_link_to_itself(self, tmp_path: Path) -> None:
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        refused(locations.library_directory(loop))

    def test_the_remedy_can_be_pasted(self, tmp_path: Path) -> None:
        folder = tmp_path / "it's mine"
        assert shlex.quote(str(folder)) in refused(folder)

    def test_another_pin(self, copied: Path) -> None:
        edit(copied, pin="llama-cpp-python==0.0.1")
        assert "is llama-cpp-python==0.0.1, but this version needs llama-cpp-python==" in refused(copied)

    def test_a_checkout_needs_no_pin(self, copied: Path) -> None:
        edit(copied, pin="source:v1-dirty")
        Stamp.read(copied).verify(copied)

    def test_a_changed_header(self, copied: Path) -> None:
        with (copied / "include" / "llama.h").open("a") as header:
            header.write("// changed\n")
        assert "have changed since the declarations were checked" in refused(copied)

    def test_edited_declarations(self, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stamps, "declarations_sha256", lambda: "0" * 64)
        assert "the declarations in llama_abi have changed" in refused(copied)

    def test_edited_declarations_are_checked_again_in_a_checkout(
        self, copied: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        edit(copied, declarations_sha256="0" * 64, mtmd_sha256="0" * 64)
        assert "the declarations in llama_abi have changed" in refused(copied)
        check_again(copied, Stamp.read(copied)).verify(copied)
        Stamp.read(copied).verify(copied)
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
        with pytest.raises(LibraryError, match="no C compiler found"):
            check_again(copied, Stamp.read(copied))

    def test_a_changed_library(self, copied: Path) -> None:
        with next(copied.glob("libggml-base.*")).open("ab") as library:
            library.write(b"\0")
        assert "have changed since the check" in refused(copied)

    def test_a_missing_library(self, copied: Path) -> None:
        next(copied.glob("libggml-cpu.*")).unlink()
        assert "have changed since the check" in refused(copied)

    def test_the_required_action(self, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stamp = Stamp.read(copied)
        build = {"source": stamp.pin, "backend": stamp.backend, "options": stamp.options}
        assert stamps.required_action(copied, **build)[0] == "nothing"
        assert stamps.required_action(tmp_path / "absent", **build)[0] == "build"
        assert stamps.required_action(copied, **{**build, "backend": "other"})[0] == "build"
        assert stamps.required_action(copied, **{**build, "options": ("-DX=1",)})[0] == "build"
        monkeypatch.setattr(stamps, "declarations_sha256", lambda: "0" * 64)
        assert stamps.required_action(copied, **build)[0] == "check"


class TestLoading:
    def test_it_is_loaded_once(self, library: llama_abi.Library, directory: Path) -> None:
        assert llama_abi.load(directory) is library

    def test_a_second_library_is_refused(self, library: llama_abi.Library, tmp_path: Path) -> None:
        with pytest.raises(LibraryError, match="use another process"):
            llama_abi.load(tmp_path)

    def test_the_variable_names_the_directory(self, tmp_path: Path) -> None:
        script = "import llama_abi\ntry: llama_abi.load()\nexcept llama_abi.LibraryError as error: print(error)"
        environment = {DIRECTORY_VARIABLE: str(tmp_path / "absent"), "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert (
            done.stdout
            == f"there is no library in {tmp_path / 'absent'}; correct the path, or run ./build_llama.sh --prefix {tmp_path / 'absent'}\n"
        )

    def test_other_defaults_are_refused(self, library: llama_abi.Library, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(llama_abi.library.EXPECTED_DEFAULTS, "n_batch", 7)
        with pytest.raises(LibraryError, match="n_batch is 2048, not 7"):
            library._check_defaults()

    def test_properties(self, library: llama_abi.Library) -> None:
        assert library.devices()
        assert any(device.type is llama_abi.DeviceType.CPU for device in library.devices())
        assert all(device.memory_free <= device.memory_total for device in library.devices())
        assert library.max_sequences >= 64
        assert library.supports_rpc
        assert library.system_info
        assert library.stamp.backend in repr(library)

    def test_the_interpreter_ends_quietly_with_everything_open(self, tiny: Path, directory: Path) -> None:
        script = f"""
import llama_abi
model = llama_abi.Model(llama_abi.load(), {str(tiny)!r})
context = llama_abi.Context(model, llama_abi.ContextOptions(n_ctx=256))
batch = llama_abi.Batch(8)
batch.add([1, 2, 3], pos=0, seq=0)
print(context.decode(batch))
"""
        environment = {DIRECTORY_VARIABLE: str(directory), "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")

    @pytest.mark.parametrize(("before", "after"), [({}, "1"), ({"GGML_NO_BACKTRACE": "0"}, "0")])
    def test_backtraces_are_off_unless_the_user_decides(
        self, directory: Path, before: dict[str, str], after: str
    ) -> None:
        script = "import llama_abi, os; llama_abi.load(); print(os.environ['GGML_NO_BACKTRACE'])"
        environment = {DIRECTORY_VARIABLE: str(directory), **before}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{after}\n"

    def test_an_assertion_prints_one_line(self, directory: Path) -> None:
        """No debugger starts, also where one is installed."""
        script = """
import ctypes, llama_abi
library = llama_abi.load()
base = next(library.directory.glob("libggml-base.*"))
ctypes.CDLL(str(base)).ggml_abort(b"file.c", ctypes.c_int(7), b"broken")
"""
        environment = {**os.environ, DIRECTORY_VARIABLE: str(directory)}
        environment.pop("GGML_NO_BACKTRACE", None)
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (-signal.SIGABRT, "file.c:7: broken\n")


class TestLogs:
    @pytest.fixture
    def router(self, caplog: pytest.LogCaptureFixture) -> llama_abi.logs.LogRouter:
        caplog.set_level(logging.DEBUG, logger="llama_abi")
        return llama_abi.logs.LogRouter()

    def test_levels(self, router: llama_abi.logs.LogRouter, caplog: pytest.LogCaptureFixture) -> None:
        for level in range(1, 5):
            router.feed(level, f"line {level}\n")
        assert [(record.levelno, record.message) for record in caplog.records] == [
            (logging.DEBUG, "line 1"),
            (logging.INFO, "line 2"),
            (logging.WARNING, "line 3"),
            (logging.ERROR, "line 4"),
        ]

    def test_fragments_become_lines(self, router: llama_abi.logs.LogRouter, caplog: pytest.LogCaptureFixture) -> None:
        for level, text in [(3, "one "), (5, "and "), (5, "two\nthr"), (5, "ee\n\n"), (2, "open"), (4, "next\n")]:
            router.feed(level, text)
        assert [(record.levelname, record.message) for record in caplog.records] == [
            ("WARNING", "one and two"),
            ("WARNING", "three"),
            ("INFO", "open"),
            ("ERROR", "next"),
        ]

    def test_warnings_of_a_failure_are_logged_as_debug(
        self, router: llama_abi.logs.LogRouter, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            with router.capture_warnings() as captured:
                router.feed(4, "it broke\n")
                router.feed(3, "beware\n")
                router.feed(4, "badly\n")
                raise LibraryError(str(captured))

        with pytest.raises(LibraryError, match="it broke; badly"):
            fail()
        assert {record.levelname for record in caplog.records} == {"DEBUG"}

    def test_warnings_of_a_success_keep_their_level(
        self, router: llama_abi.logs.LogRouter, caplog: pytest.LogCaptureFixture
    ) -> None:
        with router.capture_warnings():
            router.feed(4, "it broke\n")
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    def test_llama_cpp_logs_through_logging(
        self, library: llama_abi.Library, tiny: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, logger="llama_abi")
        llama_abi.Model(library, tiny).close()
        assert any("llama_model_loader" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "install the NVIDIA driver, "),
        (
            "libcublas.so.13: cannot open shared object file: No such file",
            "install the package that has libcublas.so.13",
        ),
        ("libggml-base.so: cannot open shared object file: No such file or directory", "run ./build_llama.sh --prefix"),
        ("/x/libllama.so: invalid ELF header", "run ./build_llama.sh --prefix /x --clean"),
    ],
)
def test_a_library_that_the_linker_refuses(error: str, remedy: str) -> None:
    assert libraries._remedy(error, Path("/x")).startswith(remedy)
