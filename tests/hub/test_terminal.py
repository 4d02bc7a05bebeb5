"""What a person sees on a terminal: a bar with rate and time left, names that the shell completes, and what to type next."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from tests.support.hub_server import FakeHub, Fault
from tests.support.model_home import Home
from tests.support.terminal import terminal

NAME = "acme/Tiny-GGUF:Q8_0"
EVENT_S = 60.0


def test_a_download_has_a_bar(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    reached, go_on = threading.Event(), threading.Event()
    hub.faults.append(Fault(cut_after=5 << 20, hold=(reached, go_on)))
    command = [sys.executable, "-m", "uma_trio", "pull", NAME]
    with terminal(command, columns=120, lines=10, environment=home.environment) as screen:
        try:
            assert reached.wait(EVENT_S)
            screen.wait_for("/7.3 MiB")
            screen.wait_for("MB/s")
            shown = screen.text
            assert NAME in shown
            assert "%" in shown
        finally:
            go_on.set()
        screen.wait_for("Serve it with: uma-trio serve --model acme/Tiny-GGUF:Q8_0")
        assert screen.wait() == 0


def test_shells_complete_names_and_aliases(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    assert home.run("pull", NAME).returncode == 0
    assert home.run("models", "alias", "tiny", NAME).returncode == 0
    for line in ("uma-trio serve --model ", "uma-trio models show ", "uma-trio tokenize --model "):
        found = home.run(_UMA_TRIO_LINE=line, _UMA_TRIO_COMPLETE="lines_complete")
        names = [each.split("\t")[1] for each in found.stdout.splitlines() if each.startswith("plain\t")]
        assert names == ["embedded", "embedded-draft", NAME, "tiny"], line


def test_a_short_name_that_is_not_here_brings_suggestions(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    refused = home.run("pull", "tiny")
    assert refused.returncode == 1
    assert "the hub has acme/Tiny-GGUF; take one of them" in refused.stderr
    assert "`uma-trio models` lists" in home.run("pull", "tiny", "--offline").stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/tmp/nothing-here.gguf", "there is no file /tmp/nothing-here.gguf; give a name such as"),
        ("nope", "there is no model nope on this machine, and cannot reach hub.invalid: its name has no address"),
        ("llama3.2:1b", "get it with ollama pull llama3.2:1b"),
        ("https://host.invalid/x.txt", "https://host.invalid/x.txt is not a .gguf file"),
        ("https://host.invalid/x.gguf", "HTTPS_PROXY names a proxy, HF_ENDPOINT another hub, and with --offline"),
    ],
)
def test_what_cannot_be_pulled_says_what_else_to_do(home: Home, name: str, reason: str) -> None:
    refused = home.run("pull", name, HF_ENDPOINT="https://hub.invalid")
    assert refused.returncode == 1
    assert reason in refused.stderr
    assert "trying again" not in refused.stderr


def test_the_models_of_the_package_are_listed_and_have_aliases(home: Home) -> None:
    assert home.run("models", "alias", "small", "embedded").returncode == 0
    assert home.run("models", "alias", "tiny", "small").returncode == 0
    listed = json.loads(home.run("models", "--json").stdout)
    assert [(each["name"], each["origin"], each["aliases"]) for each in listed] == [
        ("embedded", "the package", ["small", "tiny"]),
        ("embedded-draft", "the package", []),
    ]
    for name in ("small", "tiny", "embedded"):
        shown = home.run("models", "show", "--json", name)
        assert json.loads(shown.stdout)["origin"] == "the package", shown.stderr
        refused = home.run("models", "remove", "--yes", name)
        assert (refused.returncode, "embedded comes with the package" in refused.stderr) == (1, True)
    assert "download another model with: uma-trio pull" in home.run("models").stderr
    home.run("models", "alias", "--remove", "small")
    assert home.run("models", "show", "tiny").returncode == 0
    taken = home.run("models", "alias", "Embedded-Draft", "embedded")
    assert "the name of a model of the package; choose another one" in taken.stderr


def test_a_model_takes_its_aliases_with_it(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    assert home.run("pull", NAME).returncode == 0
    for alias, meaning in (("a", NAME), ("b", "acme/Tiny-GGUF"), ("c", "tiny"), ("other", "embedded")):
        assert home.run("models", "alias", alias, meaning).returncode == 0
    [listed] = home.listed()
    assert listed["aliases"] == ["a", "b", "c"]
    removed = home.run("models", "remove", "--yes", "b")
    assert removed.stderr.endswith(" MiB and the aliases a, b, c\n")
    assert json.loads(home.run("models", "alias", "--json").stdout) == {"other": "embedded"}
