"""Each process imports its own code: the daemon none of the engine's, and no other process the daemon's."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from typing import Final

import attrs
import pytest

SHARED: Final = "config.* errors files principal processes.* protocol.*"
"""What every process may import: settings, errors, messages, how a process starts and ends."""

MODEL: Final = "engine_link.* grammar.* models.* tokenizer.*"
"""What a model's file says, its tokenizer, and what the daemon and the engine say to each other."""


@attrs.frozen
class Process:
    """A process, and what it may import."""

    entries: str
    """What it imports when it starts."""
    modules: str
    """Patterns of modules of ``uma_trio`` that it may have; a package alone never counts."""
    no_modules: str = ""
    """Those of them that it may not have."""
    no_libraries: str = ""


PROCESSES: Final = {
    "daemon": Process(
        "cli.serve daemon.server daemon.logs",
        f"{SHARED} {MODEL} aici.controllers aici_link.* cli.completion cli.exits cli.serve cli.stdio daemon.* encoder.* hub.* telemetry.*",
        no_modules="encoder.__main__ grammar.__main__ daemon.prompts.template_worker",
        no_libraries="anyio click.testing gguf llguidance wasmtime",
    ),
    "engine": Process(
        "engine.__main__ engine.open_fitted engine.worker",
        f"{SHARED} {MODEL} engine.*",
        no_modules="grammar.checker grammar.compiler models.gguf_check",
        no_libraries="anyio click structlog trio",
    ),
    "controllers' runtime": Process(
        "cli.aicirt aici.runtime.command aici.runtime.server",
        f"{SHARED} {MODEL} aici.* aici_link.* cli.aicirt cli.exits hub.*",
        no_libraries="anyio structlog trio",
    ),
    "gateway": Process(
        "gateway.__main__ gateway.application",
        f"{SHARED} client connect.* gateway.* hub.errors hub.urls telemetry.catalogue",
        no_libraries="llama_abi numpy trio",
    ),
    "template worker": Process(
        "daemon.prompts.template_worker", "daemon.prompts.template_worker", no_libraries="numpy trio"
    ),
    "exporter of vocabularies": Process(
        "tokenizer.__main__", f"{SHARED} {MODEL}", no_libraries="anyio click structlog trio"
    ),
    "worker of the hub": Process(
        "hub.__main__", f"{SHARED} {MODEL} hub.*", no_libraries="anyio click llama_abi structlog"
    ),
    "checker": Process("grammar.__main__", "errors grammar.* processes.*", no_libraries="llama_abi msgspec numpy trio"),
    "encoder": Process("encoder.__main__", "errors encoder.* processes.*", no_libraries="anyio click msgspec trio"),
    "client": Process("client", f"{SHARED} client connect.*", no_libraries="llama_abi numpy structlog trio"),
}

FIND_IMPORTS: Final = """
import builtins, json, sys

importers, original = {}, builtins.__import__


def recorded(name, globals=None, locals=None, fromlist=(), level=0):
    before = set(sys.modules)
    try:
        return original(name, globals, locals, fromlist, level)
    finally:
        for each in set(sys.modules) - before:
            importers.setdefault(each, (globals or {}).get("__name__", ""))


builtins.__import__ = recorded
for entry in sys.argv[1:]:
    __import__(f"uma_trio.{entry}")
builtins.__import__ = original
print(json.dumps({name: importers.get(name, "") for name in sys.modules}))
"""


def imports_of(entries: str) -> dict[str, str]:
    """The modules that a fresh interpreter has after it has imported ``entries``, each with the module that imported it."""
    command = [sys.executable, "-c", FIND_IMPORTS, *entries.split()]
    found: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def chain(module: str, importers: dict[str, str]) -> str:
    """How a module came to be imported, from the entry on."""
    found = [module]
    while (importer := importers.get(found[-1], "")) not in ("", "__main__", *found):
        found.append(importer)
    return " -> ".join(reversed(found))


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns.split())


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_imports_only_its_own_modules(name: str) -> None:
    process = PROCESSES[name]
    importers = imports_of(process.entries)
    packages = {each.rpartition(".")[0] for each in importers}
    ours = {each: each.removeprefix("uma_trio.") for each in importers if each.startswith("uma_trio.")}
    wrong = [
        each
        for each, short in ours.items()
        if matches(short, process.no_modules) or not (each in packages or matches(short, process.modules))
    ]
    wrong += [each for each in process.no_libraries.split() if each in importers]
    assert not wrong, f"the {name} may not import these:\n" + "\n".join(chain(each, importers) for each in wrong)


def test_a_wrong_import_is_shown_with_the_way_to_it() -> None:
    importers = imports_of("connect.reasons")
    assert chain("uma_trio.protocol.address", importers) == "uma_trio.connect.reasons -> uma_trio.protocol.address"
