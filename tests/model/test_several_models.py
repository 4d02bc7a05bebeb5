"""Several models of a real daemon: one next to the other, on demand, reloaded under load, evicted, many times."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.commands import invoke
from tests.support.real_daemon import Daemon, real_daemon
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.usefixtures("library")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MIB = 1 << 20
WARM_UP = 3
"""Loads until all is imported and allocated that one needs."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files with the embedded model's answers and contents of their own: the last weight differs by one bit."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for number, name in enumerate(("b", "c"), 1):
        data = bytearray(EMBEDDED.read_bytes())
        data[-1] ^= number
        found[name] = folder / f"{name}.gguf"
        found[name].write_bytes(data)
    found["same"] = folder / "same.gguf"
    found["same"].write_bytes(EMBEDDED.read_bytes())
    return found


@contextmanager
def daemon_with(folder: Path, text: str, *flags: str) -> Iterator[Daemon]:
    """A daemon with a list of models."""
    file = folder / "uma.yaml"
    file.write_text(f"model: {{ctx: 4096, parallel: 4}}\n{text}")
    with real_daemon("--config", str(file), *flags, folder=folder) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def several(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the models ``embedded`` and ``b``, and ``damaged``, which cannot be loaded."""
    folder = tmp_path_factory.mktemp("several")
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(EMBEDDED.read_bytes()[:100_000])
    two = f"embedded, {{model: {models['b']}, alias: [gpt], parallel: 2}}"
    with daemon_with(folder, f"models: [{two}, {{model: {damaged}, load: demand}}]") as daemon:
        yield daemon


def act(daemon: Daemon, action: str, model: str) -> dict[str, object]:
    with daemon.wire(timeout_s=120) as wire:
        wire.send(type="models", action=action, model=model)
        answer = wire.receive()
    assert answer is not None
    return answer


def states(daemon: Daemon) -> dict[str, str]:
    return {name: found["state"] for name, found in daemon.metrics()["models"].items()}


def test_two_models_answer_next_to_each_other(several: Daemon) -> None:
    assert states(several) == {"embedded": "ready", "b": "ready", "damaged": "unloaded"}
    found = several.metrics()
    pids = {found["engine"]["pid"], found["models"]["b"]["metrics"]["engine"]["pid"]}
    assert len(pids & {each.pid for each in several.processes}) == 2
    for name in (None, "embedded", "b", "b.gguf", "gpt"):
        more = {} if name is None else {"model": name}
        assert "Paris" in several.ask(messages=QUESTION, max_tokens=20, **more).text
    found = several.metrics()
    assert found["model"] == "embedded"
    assert found["requests_total"]["stop"] == 2
    assert found["models"]["b"]["metrics"]["requests_total"]["stop"] == 3
    with several.wire() as wire:
        wire.send(type="models")
        listed = wire.receive()
    assert listed is not None
    assert [(each["name"], each["parallel"]) for each in listed["models"]][:2] == [("embedded", 4), ("b", 2)]
    assert several.ask(prompt="x", model="d").code == "E_MODEL_NOT_FOUND"
    for name in ("b", "embedded"):
        with several.wire() as wire:
            wire.send(type="watch", model=name)
            shown = wire.receive()
        assert shown is not None
        assert shown["metrics"]["model"] == name


def test_a_model_that_cannot_be_loaded_says_why_to_all_who_wait(several: Daemon) -> None:
    answer = several.ask(prompt="x", model="damaged")
    assert answer.code == "E_MODEL_UNAVAILABLE"
    assert "damaged.gguf" in answer.last["message"]
    assert answer.last["retry_after_ms"] > 0
    assert states(several) == {"embedded": "ready", "b": "ready", "damaged": "failed"}
    assert "Paris" in several.ask(messages=QUESTION, max_tokens=20).text


def test_only_the_owner_of_the_daemon_loads_and_unloads(several: Daemon) -> None:
    with several.wire() as wire:
        wire.send(type="models", action="unload", model="embedded", principal="alice")
        refused = wire.receive()
        assert refused is not None
        assert refused["code"] == "E_PROTO_BAD_REQUEST"
        assert states(several)["embedded"] == "ready"


@pytest.mark.thorough
def test_a_crash_of_one_engine_is_not_noticed_by_the_other_model(several: Daemon) -> None:
    with several.wire() as wire:
        wire.send(id="a", prompt="Hello", max_tokens=500, ignore_eos=True, temperature=0)
        assert wire.receive()["event"] == "token"
        psutil.Process(several.metrics()["models"]["b"]["metrics"]["engine"]["pid"]).kill()
        assert wire.answer().reason == "length"
        assert "Paris" in several.ask(messages=QUESTION, max_tokens=20, model="b").text
        found = several.metrics()
        assert found["engine"]["restarts_total"] == 0
        assert found["models"]["b"]["metrics"]["engine"]["restarts_total"] == 1


def test_tokenize_asks_the_daemon_for_the_names_that_only_it_knows(models: dict[str, Path], tmp_path: Path) -> None:
    text = f"models: [embedded, {{model: {models['b']}, name: only-here, alias: [other]}}]"
    said = "naïve 🦊 <|im_end|>"
    expected = {
        option: invoke("tokenize", *option, said).stdout for option in ((), ("--ids",), ("--count",), ("--json",))
    }
    with daemon_with(tmp_path, text, "--max-prompt-bytes", "40000") as daemon:

        def ask(*arguments: str) -> tuple[int, str, str]:
            found = invoke("tokenize", "--socket", daemon.socket, "--model", *arguments)
            return found.returncode, found.stdout, found.stderr

        for option, lines in expected.items():
            assert ask("only-here", *option, said) == (0, lines, "")
        ids = expected["--ids",].strip()
        assert ask("other", "--decode", ids) == (0, f"<|bos|>{said}\n", "")
        assert ask("other", "--decode", ids, "--no-special") == (0, "naïve 🦊 \n", "")
        assert ask("only-here", "--decode", "99999999")[0] == 1
        assert ask("embedded", "--count", "x" * 50_000)[0] == 0, "what is too long for the daemon is read by the file"
        act(daemon, "unload", "only-here")
        returncode, _, error = ask("only-here", said)
        assert (returncode, "no model" in error or "give its path" in error) == (1, True)
        assert states(daemon)["only-here"] == "unloaded", "nothing is loaded for it"
    assert ask("only-here", said)[0] == 1, "without a daemon there is no such model"


@pytest.mark.thorough
def test_sessions_and_states_are_those_of_one_model_also_if_the_content_is_the_same(
    models: dict[str, Path], tmp_path: Path
) -> None:
    text = f"models: [embedded, {models['b']}, {models['same']}]"
    with daemon_with(tmp_path, text, "--offload-after-s", "0") as daemon:
        for name in ("embedded", "b", "same"):
            answer = daemon.ask(model=name, session_id="s", prompt=f"I am {name}.", max_tokens=3)
            assert answer.last["session"]["turns"] == 1
            assert answer.last["session"]["durable"]
    assert len([*(tmp_path / "state-home").glob("uma-trio/*/sessions/*.session")]) == 3
    with daemon_with(tmp_path, text) as daemon:
        for name in ("embedded", "b", "same"):
            with daemon.wire() as wire:
                wire.send(type="sessions", action="read", session_id="s", model=name)
                transcript = wire.receive()
            assert transcript is not None
            assert f"I am {name}." in transcript["text"]


@pytest.mark.thorough
def test_the_commands_say_whose_a_session_is(models: dict[str, Path], tmp_path: Path) -> None:
    with daemon_with(tmp_path, f"models: [embedded, {models['b']}]") as daemon:

        def run(command: str, *arguments: str) -> tuple[str, str]:
            found = invoke(command, "--socket", daemon.socket, *arguments)
            return found.stdout, found.stderr

        assert "new session" not in run("ask", "--model", "b", "--session", "s", "--max-tokens", "2", "Hello")[1]
        head, row = run("sessions")[0].splitlines()
        assert (head.split()[:2], row.split()[:2]) == (["SESSION", "MODEL"], ["s", "b"])
        assert json.loads(run("sessions", "--json")[0])["model"] == "b"
        assert "there is one of the model b: add --model b" in run("sessions", "show", "s")[1]
        assert run("sessions", "show", "s", "--model", "b")[0].startswith("s: 1 turns")
        assert "of the model b" in run("ask", "--session", "s", "--max-tokens", "2", "Hello")[1]
        assert len(run("sessions")[0].splitlines()) == 3
        for name, n_requests in (("embedded", 1), ("b", 1)):
            found = json.loads(run("metrics", "--json", "--model", name)[0])
            assert (found["model"], sum(found["requests_total"].values())) == (name, n_requests)
        assert "serves embedded, b" in run("metrics", "--model", "c")[1]
        assert act(daemon, "unload", "b")["models"]
        left, notice = run("sessions")
        assert "not loaded: b" in notice
        assert [line.split()[0] for line in left.splitlines()] == ["SESSION", "s"]
        assert run("sessions", "close", "--all", "--yes", "--model", "b")[0] == "closed s\n"
        assert run("sessions", "close", "--all", "--yes")[0] == "closed s\n"


@pytest.mark.thorough
def test_a_reload_under_load_drops_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    answers: list[str | None] = []
    stop = threading.Event()

    with daemon_with(tmp_path, f"models: [embedded, {models['b']}]") as daemon:

        def ask(name: str, session: str | None) -> None:
            more = {} if session is None else {"session_id": session, "history": "replace"}
            while not stop.is_set():
                answer = daemon.ask(model=name, messages=QUESTION, max_tokens=30, **more)
                answers.append(answer.reason if "Paris" in answer.text else str(answer.last))

        threads = [
            threading.Thread(target=ask, args=pair)
            for pair in [("embedded", None), ("embedded", "s"), ("b", None), ("b", "s"), ("b", "t")]
        ]
        with daemon.wire(timeout_s=60) as wire:
            wire.send(id="long", model="b", prompt="Hello", max_tokens=400, ignore_eos=True, temperature=0)
            for each in threads:
                each.start()
            for _ in range(3):
                assert act(daemon, "reload", "b")["models"][0]["state"] == "ready"  # type: ignore[index]
            assert wire.answer().reason == "length"
        stop.set()
        for each in threads:
            each.join(60)
        daemon.wait_until(lambda found: found["models"]["b"]["unloads_total"] == 3, "old copies are gone")
        assert daemon.metrics()["models"]["b"]["loads_total"] == 4
        assert "Traceback" not in daemon.logs()
    assert set(answers) == {"stop"}


def test_a_third_model_evicts_the_one_that_is_idle(models: dict[str, Path], tmp_path: Path) -> None:
    text = f"models: [embedded, {models['b']}, {{model: {models['c']}, load: demand}}]"
    with daemon_with(tmp_path, text, "--max-loaded-models", "2") as daemon, daemon.wire() as wire:
        assert states(daemon) == {"embedded": "ready", "b": "ready", "c": "unloaded"}
        wire.send(id="a", prompt="Hello", max_tokens=500, ignore_eos=True)  # the default model is in use
        assert "Paris" in daemon.ask(messages=QUESTION, max_tokens=20, model="c").text
        assert states(daemon) == {"embedded": "ready", "b": "unloaded", "c": "ready"}
        assert wire.answer().reason == "length"


@pytest.mark.thorough
def test_next_to_a_pinned_model_another_one_has_the_context_that_the_budget_leaves(
    models: dict[str, Path], tmp_path: Path
) -> None:
    text = f"""
models:
  - {{model: embedded, class: pinned}}
  - {{model: {models["b"]}, load: demand, ctx: 0}}
"""
    with daemon_with(tmp_path, text, "--models-memory-mb", "100") as daemon:
        assert "Paris" in daemon.ask(messages=QUESTION, max_tokens=20, model="b").text
        found = daemon.metrics()["models"]
        assert states(daemon) == {"embedded": "ready", "b": "ready"}
        memory = {name: each["memory_bytes"] for name, each in found.items()}
        assert 90e6 < sum(memory.values()) <= 100e6, "all of the budget is used, and no more"
        whole = 8192 * 4 * 4608  # its context, sequences and bytes of a token in the KV cache
        assert memory["b"] < whole


def test_hup_takes_over_a_changed_list(models: dict[str, Path], tmp_path: Path) -> None:
    with daemon_with(tmp_path, f"models: [embedded, {models['b']}]") as daemon, daemon.wire() as wire:
        wire.send(id="a", model="b", prompt="Hello", max_tokens=700, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        (tmp_path / "uma.yaml").write_text(f"model: {{ctx: 2048, parallel: 4}}\nmodels: [embedded, {models['c']}]\n")
        daemon.signal(signal.SIGHUP)
        daemon.wait_until(
            lambda found: (
                found["models"].keys() == {"embedded", "c"}
                and found["models"]["c"]["state"] == "ready"
                and found["models"]["embedded"]["loads_total"] == 2
            ),
            "the new list is served",
            60,
        )
        assert wire.answer().reason == "length"
        assert daemon.metrics()["kv"]["cells"] == 2048
        assert daemon.ask(prompt="x", model="b").code == "E_MODEL_NOT_FOUND"
        (tmp_path / "uma.yaml").write_text("models: [embedded, {model: 3}]\n")
        daemon.signal(signal.SIGHUP)
        daemon.logged("the models stay as they are: the settings cannot be read")
        assert states(daemon).keys() == {"embedded", "c"}


def loads_and_unloads(daemon: Daemon, rounds: int) -> None:
    for _ in range(rounds):
        assert daemon.ask(prompt="Hello", model="b", max_tokens=2).reason == "length"
        assert act(daemon, "unload", "b")["models"][0]["state"] == "unloaded"  # type: ignore[index]


def footprint(daemon: Daemon) -> tuple[int, int, int]:
    """Resident memory of the daemon itself, descriptors, processes."""
    return psutil.Process(daemon.pid).memory_info().rss, daemon.n_fds(), len(daemon.processes)


@pytest.mark.parametrize("rounds", [4, pytest.param(200, marks=pytest.mark.benches)])
def test_loads_and_unloads_leave_nothing_behind(models: dict[str, Path], tmp_path: Path, rounds: int) -> None:
    shared = Path("/dev/shm")
    with daemon_with(tmp_path, f"models: [embedded, {{model: {models['b']}, load: demand}}]") as daemon:
        loads_and_unloads(daemon, WARM_UP)
        before, names = footprint(daemon), {*shared.iterdir()}
        loads_and_unloads(daemon, rounds)
        assert daemon.metrics()["models"]["b"]["loads_total"] == WARM_UP + rounds
        daemon.wait_until(lambda _: len(daemon.processes) <= before[2], "the engines have ended")
        daemon.wait_fds(before[1])
        rss, _, _ = footprint(daemon)
        print(f"{rounds} loads: {(rss - before[0]) / MIB:.1f} MiB more")
        assert rss - before[0] < 12 * MIB + rounds * 0.02 * MIB, f"{(rss - before[0]) / MIB:.1f} MiB more"
        assert {path for path in {*shared.iterdir()} - names if f".{daemon.pid}." in path.name} == set()
        assert "Traceback" not in daemon.logs()
