"""Hostile controllers in the whole daemon: each answer ends with its own error, and others never notice."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import uma_trio
from tests.support.hostile_wasm import FAILING, LOOPING, REFUSED, HostileWasm
from tests.support.profile import sampled, thorough
from tests.support.real_daemon import Canary, Daemon, real_daemon
from uma_trio.cli import main
from uma_trio.client import ServerError

LIMITS = ("--aici-step-ms", "1000", "--aici-init-ms", "3000")

NAMES = (
    *("unreachable in aici_init", "unreachable in aici_mid_process", "no end of memory in aici_pre_process"),
    *("variables without end", "aici_mid_process returns no JSON", "tokens without end"),
    *("a loop in aici_init", "a loop in aici_mid_process"),
    *map(
        thorough,
        (
            *("endless recursion in aici_post_process", "no end of memory in aici_init_prompt"),
            *("a result beyond the memory", "a loop in aici_pre_process", "a loop in aici_post_process"),
            "output without end in aici_mid_process",
        ),
    ),
)
BY_NAME = {each.name: each for each in (*FAILING, *LOOPING)}


@pytest.fixture(scope="module")
def daemon(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with real_daemon("--threads", "1", *LIMITS, folder=tmp_path_factory.mktemp("daemon")) as found:
        yield found


def upload(daemon: Daemon, wasm: bytes, folder: Path) -> tuple[int, str]:
    (folder / "hostile.wasm").write_bytes(wasm)
    words = ["controllers", "upload", str(folder / "hostile.wasm"), "--socket", str(daemon.socket)]
    result = CliRunner().invoke(main, words, prog_name="uma-trio")
    return result.exit_code, result.output


@pytest.mark.parametrize("name", sampled(NAMES, 4))
def test_controllers_that_fail(daemon: Daemon, tmp_path: Path, name: str) -> None:
    hostile = BY_NAME[name]
    with Canary(daemon) as canary:
        code, output = upload(daemon, hostile.wasm, tmp_path)
        assert code == 0, output
        found = error_of(daemon, hostile)
        assert re.search(hostile.error, found, re.DOTALL), found
    assert canary.rounds
    daemon.settled()
    assert uma_trio.run("yesno", socket=daemon.socket)[0].text in ("yes", "no")


def error_of(daemon: Daemon, hostile: HostileWasm) -> str:
    try:
        tree = uma_trio.run(hashlib.sha256(hostile.wasm).hexdigest(), socket=daemon.socket, max_tokens=20)
    except ServerError as error:
        assert error.code == "E_CONTROLLER_FAILED"  # noqa: PT017
        return str(error)
    assert tree[0].failure is not None
    assert tree[0].failure.code == "E_CONTROLLER_FAILED"
    return str(tree[0].failure.message)


@pytest.mark.parametrize("hostile", REFUSED[:4], ids=str)
def test_modules_that_are_refused(daemon: Daemon, tmp_path: Path, hostile: HostileWasm) -> None:
    code, output = upload(daemon, hostile.wasm, tmp_path)
    assert code != 0
    assert output
    daemon.settled()
