"""A plug-in library whose code hangs: the daemon, its tokenizer and doctor say so, and end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from llama_abi import locations, stamp
from llama_abi.check import find_compiler
from tests.support.commands import environment, run_process
from tests.support.real_daemon import ROOT, WAIT_S, started
from uma_trio.models.packaged import EMBEDDED

HANGS = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int ggml_backend_score(void) {
    open(OPENED, O_CREAT, 0600);
    if (ABORTS) abort();
    for (;;) pause();
}
"""
TOKENIZE = """
import sys
from pathlib import Path
from uma_trio.tokenizer.tokenizer import open_vocabulary
with open_vocabulary(Path(sys.argv[1]), Path(sys.argv[2])) as vocabulary:
    print(vocabulary.tokenizer.encode("Hello").tolist())
"""


def with_plug_in(folder: Path, *, aborts: bool = False) -> Path:
    """A copy of the library in ``folder``, with a plug-in that hangs when it is asked for its score."""
    place = folder / "lib"
    shutil.copytree(locations.library_directory(), place)
    subprocess.run(
        [
            *find_compiler().split(),
            *("-shared", "-fPIC", "-x", "c", f'-DOPENED="{folder}/opened"', f"-DABORTS={int(aborts)}", "-"),
            *("-o", str(place / "libggml-aaa.so")),
        ],
        input=HANGS,
        text=True,
        check=True,
    )
    found = stamp.Stamp.read(place)
    stamp.write(place, source=found.pin, backend=found.backend, options=("-DGGML_BACKEND_DL=ON",))
    return place


def test_the_daemon_ends_and_names_the_file(library: None, tmp_path: Path) -> None:
    place = with_plug_in(tmp_path)
    flags = ("--llama-dir", place, "--socket", tmp_path / "s", "--state-dir", tmp_path / "state")
    ended = run_process("serve", *flags, "--engine-hang-timeout-s", "1")
    assert ended.returncode == 1
    assert f"{place / 'libggml-aaa.so'} hangs while it is loaded, for 1 s; check the driver" in ended.stderr


def test_a_signal_ends_the_daemon(library: None, tmp_path: Path) -> None:
    flags = ("--llama-dir", str(with_plug_in(tmp_path)), "--engine-hang-timeout-s", "3600")
    with started(*flags, socket=tmp_path / "s", log_file=tmp_path / "log") as daemon:
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / "opened").exists():
            assert time.monotonic() < deadline, daemon.logs()
            time.sleep(0.01)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.logs()


def test_doctor_names_a_file_whose_code_fails(library: None, tmp_path: Path) -> None:
    place = with_plug_in(tmp_path, aborts=True)
    ended = run_process("doctor", "--llama-dir", place, "--socket", tmp_path / "s")
    assert f"loading {place / 'libggml-aaa.so'} crashed with SIGABRT" in ended.stdout
    assert "fix: check the driver of its device" in ended.stdout


def test_a_vocabulary_needs_no_plug_in(library: None, tmp_path: Path) -> None:
    """So none can stop the daemon, which has no other use of the library."""
    command = [sys.executable, "-c", TOKENIZE, str(EMBEDDED), str(with_plug_in(tmp_path))]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=WAIT_S, check=True
    )
    assert ended.stdout.startswith("[")
    assert not (tmp_path / "opened").exists()
