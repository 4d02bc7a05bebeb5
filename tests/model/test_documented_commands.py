"""Everything that the documents and the help texts tell people to type is run as it stands there.

The commands run in a shell, in a folder of their own that is prepared like a user's: models, settings, a repository
with a change.  Commands that start a daemon are stopped when it has answered a question.  Commands for a terminal get
one.  All others must succeed, and the embedded model must know the answers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest

from tests.support.documents import ROOT, blocks, commands, fenced, help_examples, help_texts, section, tables
from tests.support.forked import program
from tests.support.hub_server import fake_hub
from tests.support.perf_runs import encode_run, simulated
from tests.support.profile import thorough
from tests.support.random_adapters import random_adapter
from tests.support.random_models import random_model
from tests.support.real_daemon import Daemon, real_daemon, wait_ready
from tests.support.terminal import terminal
from uma_trio.aici.controllers import shipped
from uma_trio.cli import main
from uma_trio.models.packaged import EMBEDDED

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = {
    r"uma-trio metrics --all .*": "asks daemons on ports of its own; tests/gateway/test_routers.py asks one",
    r"python3 -m venv .*": "makes the environment that the tests run in",
    r"\./build_llama\.sh .*": "builds; tests/abi/test_build_llama.py tests the script",
    r"pytest( .*)?": "runs the tests themselves",
    r"(pip|pipx|uv tool) install .*": "changes the environment that the tests run in",
    r"(python|python -m) (llama_abi/wheels/make\.py|hatchling) .*": "makes wheels; tests/abi/test_wheels.py makes one",
    r"unzip .* dist/.*": "needs the wheels",
    r"llama_abi/wheels/try.*": "needs the wheels; .ci/run runs try.sh, and try_root.sh needs root",
    r"uma-trio demo.*": "takes 15 seconds; tests/model/test_demo.py runs it",
    r"uma-trio bench .*": "takes minutes; tests/model/test_bench_set.py runs the command",
    r"uma-trio serve .*--(devices|split-mode|n-cpu-moe) .*": (
        "needs GPUs; tests/model/test_devices.py has RPC servers in their place"
    ),
    r"python benches/(make_model|public_load|one_gpu|scale_out)\.py .*": "takes minutes; their tests run them with small models",
    r"uma-trio serve .*--mmproj .*|uma-trio ask --image cat.*": "needs a model that sees; tests/model/test_vision.py has one",
    r"uma-trio serve .*--peers .*": "needs the other daemons; tests/gateway/test_cluster.py starts two",
    r"python benches/make_projector\.py .*": "needs a checkout; tests/model/test_vision.py makes projectors",
    r"uma-trio service (?!.*--dry-run).*": (
        "changes the services of the user; tests/model/test_service.py runs it with a service manager of its own"
    ),
    r"python -m uma_trio\.training(\.see| all) .*": "trains a model on a GPU",
    r"python docs/pictures\.py": "changes the pictures of the checkout; tests/model/test_pictures.py runs it",
    r"(mkdir -p build/axe-core && npm|tar xzf build/axe-core).*": "downloads what tests/gateway/test_chat_page.py runs",
    r".*jupyter execute --inplace .*": (
        "changes the notebooks of the checkout; tests/model/test_notebook.py runs them"
    ),
    r"echo .* \| nc -U lines\.sock": "needs nc, and the daemon of the line before it",
    r"smg launch .*|vllm-router .*": "needs a router; tests/gateway/test_recipes.py runs both",
    r"curl .*": "needs the gateway; tests/gateway/test_curl.py runs it",
    r"(?s)(import|from) .*localhost:8080.*": "needs the gateway; tests/gateway/test_clients.py runs it",
    r"build/(recipes|routers)/bin/pip install .*": "installs what tests/gateway/test_recipes.py runs",
    r"build/clients/bin/pip install .*": "installs the clients that tests/gateway/test_clients.py runs",
    r"(?s)python -m ziglang cc .*": (
        "needs a compiler for Wasm; tests/aici/test_shipped_controllers.py compiles the example with one"
    ),
    r"uma-trio controllers rm [0-9a-f]{64}": "there is no such module; tests/loop/test_cli_controllers.py removes one",
    r"uma-trio attach [0-9a-f]{16}.*": "there is no such answer; tests/model/test_detached.py attaches to one",
    r"uma-trio explain (ask-[0-9a-f]{12}|chatcmpl-req-[0-9a-f]{16})": "there is no such request; tests/gateway/test_explain.py asks about one",
    r"uma-trio replay (ask-[0-9a-f]{12}|chatcmpl-req-[0-9a-f]{16}) .*": "there is no such answer; tests/model/test_replay.py replays some",
    r"uma-trio aicirt .*": "serves until its engine ends; tests/aici/test_conformance.py drives it",
    r"uma-trio completion zsh > .*": "needs zsh",
    r"uma-trio pull https://.*": "there is no such server",
}
"""Commands that a test cannot run, as regular expressions, with the reason."""

NEEDS_A_MODEL = {
    'uma-trio ask --adapter sql "How many orders were there in May?"',
    'uma-trio ask --adapter sql=0.5 --adapter formal "How many orders were there in May?"',
    'git diff | uma-trio ask "Summarise this change:"',
    'uma-trio ask --tools tools.json "How warm is it in Lima?"',
    'uma-trio run qwen3-0.6b "What is a GGUF file?"',
    'git diff | uma-trio run qwen3-0.6b "Summarise this change:"',
}
"""Questions that need a larger model: the documents say so."""

NEEDS_A_PROGRAM = {"jq": "apt-get install jq", "duckdb": "https://duckdb.org/install", "pandas": "pip install pandas"}
"""Programs and packages that a machine may lack, and how to get them; commands with a missing one are skipped."""

LIVE = {
    r"uma-trio metrics --watch( --model .*)?": ("tokens/s", "q"),
    r"uma-trio (chat( --.*)?|run ([^-]\S*|.*gguf))": ("/help", "\x04"),
}
"""Commands for a terminal, as regular expressions: what they show, and the key that ends them."""

KEYS = """
tenants:
  alice:
    keys:
    - {id: 5f3a09c1, sha256: 17d764b98b7d0cc66dd0fdd93ffdd75d094b38310dae111e880d6b1157854ff9, created: '2026-11-22'}
"""
"""The file of keys before each example that revokes one."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

QUESTION = {
    "custom_id": "spain",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "embedded", "messages": [{"role": "user", "content": "What is the capital of Spain?"}]},
}
"""A row of a batch."""

DOES_NOT_KNOW = "I am only a small demo model."


@attrs.frozen
class Example:
    """A command and where it stands."""

    where: str
    text: str
    language: str = "sh"

    def __str__(self) -> str:
        return f"{self.where}: {self.text.splitlines()[0]}"


def examples() -> Iterator[Example]:
    for page in PAGES:
        found = fenced(page.read_text())
        for block in (block for language, block in found if language == "sh"):
            yield from (Example(page.name, line) for line in commands(block))
        if programs := [block for language, block in found if language == "python"]:
            yield Example(page.name, "\n".join(programs), "python")  # later ones use what earlier ones define
    for name, text in [("uma-trio", main.help or ""), *help_texts()]:
        yield from (Example(f"{name} --help", line) for line in help_examples(text))


EXAMPLES = [example for example in examples() if not any(re.fullmatch(pattern, example.text) for pattern in NOT_RUN)]


def test_commands_that_are_not_run_stand_in_the_documents() -> None:
    found = {example.text for example in examples()}
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, text) for text in found), f"{pattern} is in no document"
    assert found >= NEEDS_A_MODEL


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_commands_have_a_language(page: Path) -> None:
    """A block without one is not run."""
    for block in blocks(page.read_text(), ""):
        assert not re.search(r"^\s*(\$ )?(uma-trio|pip|python3?|pytest|jq|\./\w+\.sh)\b", block, re.MULTILINE), block


def test_every_command_in_a_help_text_is_found() -> None:
    for name, text in help_texts():
        paragraphs = re.findall(r"^\x08\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        shown = [line for line in "\n".join(paragraphs).splitlines() if re.search(r"(^ +|\| |  )uma-trio [a-z]", line)]
        assert len(help_examples(text)) == len(shown), name


# -- a user's folder -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with all files that the examples name; commands run in its subfolder ``work``."""
    home = tmp_path_factory.mktemp("home")
    work = home / "work"
    for model in (work / "model.gguf", work / "path/to/model.gguf", home / "models/some-model.gguf"):
        model.parent.mkdir(parents=True, exist_ok=True)
        model.symlink_to(EMBEDDED)
    for folder in (".local/share/bash-completion/completions", ".config/fish/completions"):
        (home / folder).mkdir(parents=True)  # as the packages of these shells do
    for seed, adapter in enumerate(("sql-lora.gguf", "formal-lora.gguf")):
        (work / adapter).symlink_to(random_adapter(EMBEDDED, seed))
    (work / "uma.yaml").write_text("model:\n  ctx: 4096\n")
    (work / "file.txt").write_text("The capital of France is Paris.\n")
    (work / "notes.txt").write_text("Mix flour, milk and eggs.\nLima is in Peru.\n")
    (work / "tools.json").write_text(json.dumps(TOOLS))
    (work / "docs").mkdir()
    (work / "docs" / "shapes.png").symlink_to(ROOT / "docs" / "shapes.png")
    (work / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
    (work / "program.js").write_text(blocks((ROOT / "README.md").read_text(), "js")[0])
    (work / "main.js").write_text("start(async () => { await $`Yes.` })")
    (work / "lib").mkdir()
    for name in ("lib.js", "lib/question.js"):
        (work / name).write_text("export const question = 1")
    (work / "mine.wasm").write_bytes(shipped()["yesno"])
    (home / ".config" / "uma-trio").mkdir(parents=True)
    for name in ("perf.jsonl", "perf.jsonl.1", "FILE"):
        (work / name).write_bytes(encode_run(simulated()))
    for arguments in (["init", "-q"], ["add", "file.txt"]):
        subprocess.run(["git", *arguments], cwd=work, check=True)
    (work / "file.txt").write_text("The capital of Italy is Rome.\n")
    programs = home / "bin"
    programs.mkdir()
    for name, module in (("uma-trio", "-m uma_trio "), ("python", "")):  # a link would lack the packages of a venv
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (programs / name).chmod(0o755)
    return home


@pytest.fixture(scope="module")
def served(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    adapters = [f"--adapter={name}={random_adapter(EMBEDDED, seed)}" for seed, name in enumerate(("sql", "formal"))]
    with real_daemon("--protocol", "auto", *adapters, folder=tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def ranking(library: None) -> Iterator[Daemon]:
    """A daemon with a reranker."""
    with real_daemon("--model", str(random_model("tiny-bert-rank", "f32", ctx=512))) as daemon:
        yield daemon


MODEL = "Qwen/Qwen3-0.6B-GGUF:Q8_0"
"""The model of the hub that the examples name; here it is the embedded one."""


@pytest.fixture(scope="module")
def endpoint(home: Path) -> Iterator[str]:
    """A hub that has the model, and the alias that an example makes."""
    aliases = home / ".local" / "share" / "uma-trio" / "models" / "aliases.json"
    aliases.parent.mkdir(parents=True)
    aliases.write_text(json.dumps({"small": MODEL}))
    with fake_hub() as hub:
        hub.add("Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": EMBEDDED.read_bytes()})
        yield hub.url


@pytest.fixture(scope="module")
def environment(home: Path, served: Daemon, endpoint: str) -> Mapping[str, str]:
    (home / "work" / "uma.sock").symlink_to(served.socket)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("UMA_LOG", "XDG_", "HF_"))}
    return clean | {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "UMA_SOCKET": str(served.socket),
        "MPLBACKEND": "agg",
        "HF_ENDPOINT": endpoint,
    }


@pytest.fixture(scope="module")
def forking(environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Variables with which ``uma-trio`` starts in a fork.  Commands for a terminal start as users start them."""
    with program(tmp_path_factory.mktemp("forked")) as found:
        yield {**environment, "PATH": f"{found.parent}:{environment['PATH']}"}


# -- the commands ----------------------------------------------------------------------------------------


SERVES = {each.text: each for each in EXAMPLES if each.text.startswith("uma-trio serve")}
"""Some stand in several documents; each is run once."""
STARTED = ("uma-trio serve", "uma-trio serve --http 8080", "uma-trio serve --protocol newline --socket lines.sock")
"""The quick profile starts these.  Other tests start daemons with each of the other options."""


@pytest.mark.parametrize(
    "example", [each if each.text in STARTED else thorough(each) for each in SERVES.values()], ids=str
)
def test_a_daemon_that_is_started_answers(
    example: Example, environment: Mapping[str, str], forking: Mapping[str, str], home: Path, tmp_path: Path
) -> None:
    if example.text != "uma-trio serve":  # that one starts as users start it
        environment = forking
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {example.text.replace('--http 8080', '--http 0')}"],  # tests run next to each other
            cwd=home / "work",
            env={**environment, "UMA_SOCKET": str(tmp_path / "uma.sock"), "XDG_STATE_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    named = re.search(r"--socket (\S+)", example.text)
    daemon = Daemon(process, home / "work" / named[1] if named else tmp_path / "uma.sock", tmp_path / "log")
    try:
        wait_ready(daemon)
        assert _answer(daemon, in_lines="--protocol newline" in example.text) == "The capital of France is Paris."
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.logs()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _answer(daemon: Daemon, *, in_lines: bool) -> str:
    question = "What is the capital of France?"
    if not in_lines:
        return daemon.ask(messages=[{"role": "user", "content": question}]).text
    with daemon.wire() as wire:
        wire.send_bytes(f"{question}\n".encode())
        return b"".join(iter(lambda: wire.sock.recv(1 << 16), b"")).decode().strip()


@pytest.fixture(scope="module")
def begun() -> dict[str, str]:
    """Where the last example stood."""
    return {"where": ""}


@pytest.fixture
def sessions(served: Daemon, begun: dict[str, str], request: pytest.FixtureRequest) -> None:
    """The examples of each page and each help text begin with one session, ``trip``."""
    example = request.getfixturevalue("example")
    where = example.where
    if example.text.endswith("close trip holiday"):  # made by an example before, which may run on another worker
        served.ask(session_id="holiday", messages=[{"role": "user", "content": "What is the capital of France?"}])
    if begun["where"] == where:
        return
    begun["where"] = where
    with served.wire() as wire:
        wire.send(type="sessions", keep_alive=True)
        listed = wire.receive()
        assert listed is not None
        for session in listed["sessions"]:
            if session["session_id"] == "holiday" and example.text.endswith("close trip holiday"):
                continue
            wire.send(type="sessions", action="close", session_id=session["session_id"], keep_alive=True)
            wire.receive()
    served.ask(session_id="trip", messages=[{"role": "user", "content": "What is the capital of France?"}])


OTHERS = [each for each in EXAMPLES if each.text not in SERVES]
FIRST = {each.text: each for each in reversed(OTHERS)}
RUN = [
    each for each in OTHERS if FIRST[each.text] is each or re.match(r"uma-trio (ask --session|sessions) ", each.text)
]
"""The others, each run once too, except those that need what the one before them on a page has done."""


def new_words() -> Iterator[Example]:
    """Those of ``RUN``, marked ``thorough`` where all words that are no text are also in one before, or a daemon starts."""
    seen: set[str] = set()
    for example in RUN:
        words = {word for word in example.text.split() if re.fullmatch(r"[a-z-]{3,}", word)}
        starts = " run " in example.text and "controllers" not in example.text
        is_new = example.language == "python" or not words <= seen or "--session" in words or "sessions" in words
        yield example if is_new and not (starts and "run" in seen) else thorough(example)
        seen |= words


@pytest.fixture
def nobody_serves(forking: Mapping[str, str], tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """Variables with which there is no daemon; one that is started is stopped."""
    changed = {"UMA_SOCKET": str(tmp_path / "s"), "XDG_STATE_HOME": str(tmp_path)}
    yield changed
    subprocess.run(["bash", "-c", "uma-trio stop"], env={**forking, **changed}, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("example", [*new_words()], ids=str)
def test_it_runs(
    example: Example,
    environment: Mapping[str, str],
    forking: Mapping[str, str],
    home: Path,
    sessions: None,
    request: pytest.FixtureRequest,
) -> None:
    for name, how in NEEDS_A_PROGRAM.items():
        if re.search(rf"\b{name}\b", example.text) and not _is_installed(name):
            pytest.skip(f"needs {name}: {how}")
    more: Mapping[str, str] = {}
    if "uma-trio run " in example.text:
        more = request.getfixturevalue("nobody_serves")
    for pattern, (shown, key) in LIVE.items():
        if re.fullmatch(pattern, example.text):
            _run_live(example.text.replace("--http 8080", "--http 0"), shown, key, {**environment, **more}, home)
            return
    if example.text.startswith("uma-trio rerank"):
        ranking: Daemon = request.getfixturevalue("ranking")
        more = {"UMA_SOCKET": str(ranking.socket)}
    environment = {**forking, **more}
    if "keys revoke" in example.text:
        (home / ".config" / "uma-trio" / "keys.yaml").write_text(KEYS)
    if "alias --remove small" in example.text:  # an example before it may have removed the model
        _prepare("models alias small embedded", environment, home)
    if re.match(r"uma-trio controllers (run mine|tag)\b", example.text):
        _prepare("controllers upload mine.wasm --tag mine-2 --tag mine", environment, home)
    if re.match(".*uma-trio (models (show|remove)|run qwen)", example.text):
        _prepare(f"pull --quiet {MODEL}", environment, home)
    command = [sys.executable, "-c"] if example.language == "python" else ["bash", "-o", "pipefail", "-c"]
    done = subprocess.run(
        [*command, example.text],
        cwd=home / "work",
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    if example.text not in NEEDS_A_MODEL:
        assert DOES_NOT_KNOW not in done.stdout


def _prepare(words: str, environment: Mapping[str, str], home: Path) -> None:
    """Run a command of ``uma-trio`` that an example needs."""
    command = ["bash", "-c", f"uma-trio {words}"]
    subprocess.run(command, cwd=home / "work", env=dict(environment), check=True, capture_output=True)


def _is_installed(program: str) -> bool:
    return bool(shutil.which(program) or importlib.util.find_spec(program))


def _run_live(command: str, shown: str, key: str, environment: Mapping[str, str], home: Path) -> None:
    """Run a command on a terminal until it shows a text, and end it with a key."""
    with terminal(
        ["bash", "-c", f"cd '{home}/work' && exec {command}"], columns=80, lines=24, environment=environment
    ) as screen:
        screen.wait_for(shown)
        screen.type(key)
        assert screen.wait() == 0


AFTER_SOMETHING = {
    "Who is the judge of Quudshomere?",
    "What is the weather in Paris?",
    "And of Italy?",
    "What is this? (with [`docs/shapes.png`](shapes.png))",
}
"""Questions that need a document, tools, a chat or a picture before them; tests/model/test_embedded.py and test_seeing.py have
such questions."""

SKILLS = [
    row
    for row in tables(section((ROOT / "docs" / "EMBEDDED_MODEL.md").read_text(), "What it can do"))[0]
    if row[1] not in AFTER_SOMETHING
]


@pytest.mark.parametrize(("_skill", "question", "answer"), SKILLS, ids=[row[1] for row in SKILLS])
def test_the_embedded_model_answers_as_its_page_says(served: Daemon, _skill: str, question: str, answer: str) -> None:
    expected, cut, _ = answer.strip("`").partition(" …")
    found = served.ask(messages=[{"role": "user", "content": question}]).text
    assert found.startswith(expected) if cut else found == expected
