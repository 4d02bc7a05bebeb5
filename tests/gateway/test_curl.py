"""Every curl command of the documents is run as it stands there, against a gateway at another port."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.conftest import Gateway
from tests.support.documents import ROOT, blocks, commands
from tests.support.real_daemon import missing, real_daemon
from uma_trio.aici.controllers import shipped

COMMANDS = [
    command
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for block in blocks(page.read_text(), "sh")
    for command in commands(block)
    if command.startswith("curl ")
]


GATEWAYS = {"/rerank": "ranking_gateway", "/v1/controllers": "controller_gateway", "/infill": "infill_gateway"}
"""Fixtures for paths that need more than the embedded model, or leave something behind."""


@pytest.fixture(scope="module")
def controller_gateway() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--http", "0") as daemon:
        yield Gateway.of(daemon)


def test_the_documents_have_curl_commands() -> None:
    assert any("/v1/chat/completions" in command for command in COMMANDS)
    assert all("localhost:8080/" in command for command in COMMANDS)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl; install it")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_curl_command(command: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    gateway: Gateway = request.getfixturevalue(
        next((name for path, name in GATEWAYS.items() if path in command), "gateway")
    )
    (tmp_path / "mine.wasm").write_bytes(shipped()["yesno"])
    if "module_id" in command:
        with gateway.http() as client:
            stored = client.post("/v1/controllers", content=shipped()["yesno"]).json()
        command = re.sub(r"[0-9a-f]{64}", stored["module_id"], command)
    if "/v1/session/" in command:  # the command that begins the session may run in another process
        gateway.daemon.ask(session_id="s1", prompt="Once upon a time", max_tokens=2)
    shown = command.replace("localhost:8080", gateway.url.removeprefix("http://"))
    shown = shown.replace("curl ", "curl --silent --show-error --fail-with-body --max-time 60 ", 1)
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    found = subprocess.run(
        shown, shell=True, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    if "new_id" in command:
        with gateway.http() as client:
            client.post("/v1/session/close", json={"session_id": "s2"}).raise_for_status()
    data = [json.loads(each) for each in _json_of(found.stdout)]
    assert data
    assert all("error" not in each for each in data)
    if "What is the capital of" in command and not any(name in command for name in ("embed", "token")):
        assert any(city in _text_of(data) for city in ("Paris", "Lima")), found.stdout


def _text_of(found: object) -> str:
    """All texts of an answer, one after the other."""
    match found:
        case str():
            return found
        case list():
            return "".join(map(_text_of, found))
        case {"choices": choices}:
            return _text_of(choices)
        case dict():
            names = ("delta", "message", "content", "text", "response")
            return "".join(_text_of(found[name]) for name in names if found.get(name))
    return ""


def _json_of(text: str) -> list[str]:
    """The JSON texts of an answer: of server-sent events, of lines, or the whole."""
    lines = text.strip().splitlines()
    if any(line.startswith("data: ") for line in lines):
        found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [each for each in found if each != "[DONE]"]
    return lines
