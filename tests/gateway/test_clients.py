"""Every Python program of the documents that talks to the gateway is run as it stands there, at another port."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import yaml

from tests.gateway.conftest import Gateway
from tests.support.documents import ROOT, blocks, fenced
from tests.support.profile import sampled

CLIENTS = ROOT / "docs" / "CLIENTS.md"
OWN_ENVIRONMENT = ROOT / "build" / "clients" / "bin" / "python"
"""Has the libraries of the extra ``clients``, as CONTRIBUTING.md says."""

PARSERS = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}


@attrs.frozen
class Program:
    """All Python blocks of one section: later ones use what earlier ones define."""

    where: str
    text: str

    @property
    def libraries(self) -> set[str]:
        """Top-level names of what it imports."""
        nodes = list(ast.walk(ast.parse(self.text)))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        return {name.partition(".")[0] for name in names}

    @property
    def printed(self) -> list[str]:
        """Lines that it prints, in this order: the comments after its calls of ``print``."""
        return re.findall(r"print\(.*\)  # (.+)$", self.text, re.MULTILINE)

    def __str__(self) -> str:
        return self.where


def programs() -> Iterator[Program]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            text = "\n".join(blocks(section, "python"))
            if "localhost:8080" in text:
                yield Program(f"{page.name} {section.splitlines()[0]}", text)


PROGRAMS = list(programs())


ENDS_AT_ONCE = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
"""Behind a program.  At the end of the interpreter, threads of LiteLLM sometimes wait for each other for ever."""


def test_every_client_has_a_program() -> None:
    found = set[str]().union(*(program.libraries for program in PROGRAMS))
    assert found >= {"openai", "anthropic", "ollama", "langchain_openai", "llama_index", "litellm"}


def _python_with(libraries: set[str]) -> Path:
    """Skips the test where neither this environment nor the clients' own has all ``libraries``."""
    if all(importlib.util.find_spec(name) for name in libraries):
        return Path(sys.executable)
    find = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    if not OWN_ENVIRONMENT.exists() or subprocess.run([OWN_ENVIRONMENT, "-c", find, *libraries]).returncode:
        pytest.skip("python3 -m venv build/clients && build/clients/bin/pip install -e '.[clients]'")
    return OWN_ENVIRONMENT


@pytest.mark.parametrize("program", sampled(PROGRAMS, 9), ids=str)
def test_a_program(gateway: Gateway, program: Program, tmp_path: Path) -> None:
    python = _python_with(program.libraries)
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it LiteLLM asks the network for prices
    text = program.text.replace("localhost:8080", gateway.url.removeprefix("http://"))
    done = subprocess.run(
        [python, "-c", text + ENDS_AT_ONCE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = iter(done.stdout.splitlines())
    for expected in program.printed:
        assert expected in lines, f"{expected!r} is missing, or not in its place:\n{done.stdout}"
    gateway.daemon.settled()


def test_configurations_can_be_parsed() -> None:
    parsed = [PARSERS[language](text) for language, text in fenced(CLIENTS.read_text()) if language in PARSERS]
    assert len(parsed) == 3
    assert all("http://localhost:8080/v1" in str(each) for each in parsed)
