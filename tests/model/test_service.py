"""The daemon under a service manager: a socket that it is given, readiness, the watchdog; and its installation."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from llama_abi.locations import DIRECTORY_VARIABLE
from tests.support.forked import UMA_TRIO, can_fork, run_forked
from tests.support.real_daemon import ROOT, START_S, Daemon, Wire, started
from uma_trio.cli.service_units import MARK, Service, Systemd
from uma_trio.connect.reasons import is_locked
from uma_trio.models.packaged import EMBEDDED

VARIABLES = {"LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


class ServiceManager:
    """Listens for the daemon and starts it, as systemd does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "uma.sock"
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(self.path))
        self.listening.listen(16)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(folder / "notify"))
        self._notified.settimeout(START_S)

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()
        self._notified.close()

    @contextlib.contextmanager
    def start(self, *flags: str, **environment: str) -> Iterator[Daemon]:
        """Start the daemon with the socket as file descriptor 3."""
        fd = self.listening.fileno()
        command = (*UMA_TRIO, "serve")
        with started(
            *flags,
            socket=self.path,
            log_file=self.folder / "log",
            environment={"LISTEN_FDS": "1", "NOTIFY_SOCKET": str(self.folder / "notify"), **environment},
            command=("bash", "-c", f'LISTEN_PID=$$ exec "$@" 3<&{fd} {fd}<&-', "bash", *command),
            pass_fds=(fd,),
        ) as daemon:
            yield daemon

    def wait_for(self, assignment: str) -> list[str]:
        """Wait for the notification with ``assignment``; returns all assignments up to its end."""
        found: list[str] = []
        while assignment not in found:
            found += self._notified.recv(4096).decode().split("\n")
        return found


@pytest.fixture
def manager(library: None, tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as found:
        yield found


def test_the_first_client_is_answered_and_the_socket_outlives_the_daemon(manager: ServiceManager) -> None:
    inode = manager.path.lstat().st_ino
    for _ in range(2):
        with Wire(manager.path, timeout_s=START_S) as early:
            early.send(id="early", prompt="Hello", max_tokens=2)  # before there is a daemon
            with manager.start() as daemon:
                assert manager.wait_for("READY=1") == [
                    "STATUS=loading the model",
                    "READY=1",
                    f"STATUS=serving embedded on {manager.path}",
                ]
                assert early.answer().reason == "length"
                assert is_locked(manager.path)
                assert daemon.ask(prompt="Hello", max_tokens=2).reason == "length"
                for process in daemon.processes[1:]:
                    assert not VARIABLES & set(process.environ()), process
                    assert not any(found.laddr == str(manager.path) for found in process.net_connections("unix"))
                daemon.signal(signal.SIGTERM)
                assert manager.wait_for("STOPPING=1") == ["STOPPING=1", "STATUS=draining"]
                assert daemon.wait() == 0
                assert "Traceback" not in daemon.logs()
        assert manager.path.lstat().st_ino == inode
        assert not is_locked(manager.path)


def test_the_watchdog_is_pinged_by_a_daemon_that_serves(manager: ServiceManager) -> None:
    with manager.start(WATCHDOG_USEC="100000"):
        manager.wait_for("READY=1")
        for _ in range(5):
            manager.wait_for("WATCHDOG=1")


def test_a_socket_that_cannot_be_served_is_explained(manager: ServiceManager) -> None:
    manager.listening.close()
    manager.listening = socket.socket(socket.AF_INET)
    manager.listening.listen(1)
    with manager.start() as daemon:
        assert daemon.wait() == 1
        assert daemon.logs().startswith("uma-trio serve: systemd passed something other than")
        assert daemon.logs().count("\n") == 1


# -- uma-trio service -------------------------------------------------------------------------------


class Home:
    """A user's home with a ``systemctl`` that notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "config" / "systemd" / "user"
        (folder / "bin").mkdir()
        (folder / "run").mkdir(mode=0o700)
        self.systemctl(code=0)

    def systemctl(self, *, code: int, prints: str = "") -> None:
        program = self.folder / "bin" / "systemctl"
        program.write_text(f'#!/bin/sh\necho "$@" >> {self.folder}/asked\necho {shlex.quote(prints)}\nexit {code}\n')
        program.chmod(0o755)

    def asked(self) -> list[str]:
        """What systemctl was asked for since the last call."""
        file = self.folder / "asked"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        asked = [line.removeprefix("--user ") for line in found]
        return [each for each in asked if each != "is-system-running"]

    def run(
        self, *arguments: object, under: Sequence[str] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
        clean |= {name: os.environ[name] for name in (DIRECTORY_VARIABLE,) if name in os.environ}
        variables = {
            **clean,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            **environment,
        }
        words = ["service", *map(str, arguments)]
        if can_fork({}) and not under:
            return run_forked(words, self.folder, variables)
        return subprocess.run(
            [*under, *UMA_TRIO, *words], cwd=self.folder, text=True, capture_output=True, timeout=60, env=variables
        )


linux = pytest.mark.skipif(sys.platform != "linux", reason="systemd is of Linux")


@pytest.fixture
def home(library: None, tmp_path: Path) -> Home:
    return Home(tmp_path)


@linux
def test_install_writes_the_units_and_says_what_is_next(home: Home) -> None:
    shown = home.run("install", "--dry-run")
    assert (shown.returncode, shown.stderr, home.units.exists()) == (0, "", False)
    found = home.run("install")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[:5] == [
        f"wrote {home.units}/uma-trio.socket",
        f"wrote {home.units}/uma-trio.service",
        "next: systemctl --user daemon-reload",
        "next: systemctl --user enable --now uma-trio.socket",
        f"clients find the daemon at {home.folder}/run/uma-trio/uma.sock",
    ]
    for unit in home.units.iterdir():
        assert unit.read_text() in shown.stdout
    assert f"ExecStart={sys.executable} " in (home.units / "uma-trio.service").read_text()
    assert home.asked() == []


@linux
def test_install_checks_the_flags_of_serve_and_makes_paths_absolute(home: Home) -> None:
    (home.folder / "my model.gguf").write_bytes(EMBEDDED.read_bytes())
    (home.folder / "uma.yaml").write_text("limits:\n  drain_timeout_s: 100\n")
    (home.folder / "chat.jinja").write_text("{{ messages[0].content }}")
    flags = ("-m", "my model.gguf", "--config", "uma.yaml", "--ctx", "32k", "--no-mmap", "--socket", "x.sock")
    installed = home.run("install", "--", *flags, "--chat-template", "chat.jinja")
    assert (installed.returncode, installed.stderr) == (0, "")
    unit = (home.units / "uma-trio.service").read_text()
    arguments = unit.partition("ExecStart=")[2].partition(" serve ")[2]
    assert shlex.split(arguments.splitlines()[0]) == [
        *("--config", f"{home.folder}/uma.yaml"),
        *("--model", f"{home.folder}/my model.gguf"),
        *("--chat-template", f"{home.folder}/chat.jinja"),
        *("--ctx", "32k", "--no-mmap"),
    ]
    assert "TimeoutStopSec=230\n" in unit
    assert f"ListenStream={home.folder}/x.sock\n" in (home.units / "uma-trio.socket").read_text()


@linux
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ctxx", "3"], "No such option '--ctxx'"),
        (["--ctx", "three"], "--ctx: ctx must be a whole number"),
        (["--model", "none.gguf"], "there is no model at none.gguf"),
        (["--model", "damaged.gguf"], "cannot load damaged.gguf"),
        (["--llama-dir", "nowhere"], "nowhere"),
        (["--chat-template", "none.jinja"], "there is no chat template none.jinja"),
        (["--print-config"], "--print-config is not for a service"),
        (["--config", "relative.yaml"], "relative.yaml: model is some.gguf"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--socket", "x" * 120], "a socket has at most 103 bytes"),
        (["--socket", "a\nb"], "systemd cannot listen on"),
        (["model.gguf"], "for a model write: uma-trio serve --model"),
    ],
)
def test_install_refuses_what_the_daemon_would_refuse(home: Home, flags: list[str], message: str) -> None:
    (home.folder / "damaged.gguf").write_bytes(EMBEDDED.read_bytes()[:5000])
    (home.folder / "relative.yaml").write_text("model:\n  model: some.gguf\n")
    found = home.run("install", "--now", "--", *flags)
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert not home.units.exists()
    assert home.asked() == []


@linux
def test_install_now_starts_the_socket_and_uninstall_removes_everything(home: Home) -> None:
    home.units.mkdir(parents=True)
    (home.units / "other.service").write_text("[Service]\n")
    assert home.run("install", "--now").returncode == 0
    assert home.asked() == ["daemon-reload", "enable --now uma-trio.socket"]
    assert home.run("install", "--now").returncode == 0
    assert home.asked() == ["daemon-reload", "enable --now uma-trio.socket"], "nothing has changed"
    changed = home.run("install", "--now", "--", "--ctx", "4k")
    assert changed.stdout.startswith(f"replaced {home.units}/uma-trio.socket\n")
    assert home.asked() == [
        "daemon-reload",
        "stop uma-trio.service uma-trio.socket",
        "enable --now uma-trio.socket",
    ]
    removed = home.run("uninstall")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert home.asked() == ["disable --now uma-trio.socket uma-trio.service", "daemon-reload"]
    assert [path.name for path in home.units.iterdir()] == ["other.service"]
    again = home.run("uninstall")
    assert (again.returncode, again.stdout, home.asked()) == (0, "the service is not installed\n", [])


@linux
def test_units_of_somebody_else_stay(home: Home) -> None:
    home.units.mkdir(parents=True)
    unit = home.units / "uma-trio.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    for command in ("install", "uninstall"):
        found = home.run(command)
        assert (found.returncode, "was not written by uma-trio service install" in found.stderr) == (2, True)
    assert unit.read_text() == "[Service]\nExecStart=/bin/true\n"
    assert [*home.units.iterdir()] == [unit]
    assert home.asked() == []


@linux
def test_a_unit_of_somebody_else_does_not_keep_ours(home: Home) -> None:
    home.run("install")
    unit = home.units / "uma-trio.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    found = home.run("uninstall")
    assert found.returncode == 1
    assert f"this unit stays: {unit} was not written by" in found.stderr
    assert home.asked() == ["disable --now uma-trio.socket", "daemon-reload"]
    assert [*home.units.iterdir()] == [unit]


@linux
@pytest.mark.parametrize("kind", ["masked", "link", "dangling", "pipe", "binary"])
def test_what_is_no_unit_is_neither_read_nor_written(home: Home, kind: str) -> None:
    home.units.mkdir(parents=True)
    unit, target = home.units / "uma-trio.service", home.folder / "target"
    if kind == "pipe":
        os.mkfifo(unit)
    elif kind == "binary":
        unit.write_bytes(b"\xff")
    else:
        unit.symlink_to("/dev/null" if kind == "masked" else target)
        if kind == "link":
            target.write_text(f"# {MARK}\n")
    for command in ("install", "uninstall"):
        found = home.run(command)
        assert (found.returncode, "was not written by uma-trio service install" in found.stderr) == (2, True)
    assert [*home.units.iterdir()] == [unit]
    assert target.exists() == (kind == "link")


@linux
def test_units_that_cannot_be_written_are_installed_later(home: Home) -> None:
    home.run("install")
    before = {path: path.read_text() for path in home.units.iterdir()}
    full_disk = ["bash", "-c", 'ulimit -f 0; exec "$@" > /dev/null', "bash"]
    found = home.run("install", "--", "--ctx", "16k", under=full_disk)
    assert (found.returncode, "cannot write" in found.stderr, "Traceback" in found.stderr) == (2, True, False)
    assert {path: path.read_text() for path in home.units.iterdir()} == before
    assert home.run("install", "--", "--ctx", "16k").returncode == 0
    assert home.run("uninstall").returncode == 0
    assert [*home.units.iterdir()] == []


@linux
def test_a_relative_folder_for_settings_is_ignored(home: Home) -> None:
    found = home.run("install", "--dry-run", XDG_CONFIG_HOME="config", HOME=str(home.folder))
    assert found.stdout.startswith(f"# {home.folder}/.config/systemd/user/uma-trio.socket\n")


@linux
def test_a_built_in_template_is_not_a_file_of_the_same_name(home: Home) -> None:
    (home.folder / "chatml").write_text("not this one")
    for given, installed in (("chatml", "chatml"), ("./chatml", f"{home.folder}/chatml")):
        found = home.run("install", "--dry-run", "--", "--chat-template", given)
        assert f" --chat-template {installed}\n" in found.stdout


@linux
def test_a_systemctl_that_fails(home: Home) -> None:
    home.systemctl(code=1, prints="")
    found = home.run("install", "--now")
    assert (found.returncode, "systemctl --user daemon-reload failed" in found.stderr) == (1, True)
    assert home.asked() == ["daemon-reload"]
    removed = home.run("uninstall")
    assert removed.returncode == 1
    assert [*home.units.iterdir()] == [], "the files go all the same"
    nothing = home.run("status")
    assert (nothing.returncode, "not installed" in nothing.stdout) == (1, True)


@linux
@pytest.mark.parametrize("prints", ["offline", "unknown", None])
def test_without_systemd_nothing_is_installed_and_what_was_can_go(home: Home, prints: str | None) -> None:
    def is_gone() -> None:
        if prints is None:
            (home.folder / "bin" / "systemctl").unlink()
        else:
            home.systemctl(code=1, prints=prints)

    search = {} if prints is not None else {"PATH": str(home.folder / "bin")}
    is_gone()
    for flags in ([], ["--now"]):
        found = home.run("install", *flags, **search)
        assert (found.returncode, found.stdout, home.units.exists()) == (1, "", False)
        assert "nothing was installed: " in found.stderr
        assert "Start the daemon yourself with uma-trio serve" in found.stderr
    home.systemctl(code=0)
    assert home.run("install").returncode == 0
    is_gone()
    shown = home.run("status", **search)
    assert (shown.returncode, "is installed and cannot run: " in shown.stderr) == (1, True)
    removed = home.run("uninstall", **search)
    assert (removed.returncode, removed.stderr, [*home.units.iterdir()]) == (0, "", [])


@linux
def test_status_shows_what_systemd_says(home: Home) -> None:
    home.run("install")
    for prints, code in (("     Active: active (listening) since Sun", 0), ("     Active: failed (Result: x)", 1)):
        home.systemctl(code=3, prints=prints)  # 3: one of the units does not run
        found = home.run("status")
        assert (found.returncode, found.stdout) == (code, f"{prints}\n")


@linux
def test_install_keeps_names_and_several_models(home: Home) -> None:
    (home.folder / "b.gguf").write_bytes(EMBEDDED.read_bytes())
    for flags, arguments in (
        (["-m", "embedded"], "--model embedded"),
        (["-m", "embedded", "--model", "b.gguf"], f"--model embedded --model {home.folder}/b.gguf"),
    ):
        assert home.run("install", "--", *flags).returncode == 0
        [unit] = home.folder.rglob("uma-trio.service")
        assert f" serve {arguments}" in unit.read_text()
    (home.folder / "uma.yaml").write_text("models: [embedded, b.gguf]\n")
    refused = home.run("install", "--", "--config", "uma.yaml")
    assert "a model is b.gguf, and a service has no folder" in refused.stderr


def test_install_names_what_does_not_reach_the_service(home: Home) -> None:
    found = home.run("install", UMA_CTX="4k", UMA_SOCKET=str(home.folder / "mine.sock"))
    assert found.stderr == "not part of the service: UMA_CTX; give the flags of serve after --\n"
    assert f"ListenStream={home.folder}/mine.sock\n" in (home.units / "uma-trio.socket").read_text()


@linux
def test_install_now_does_not_take_the_socket_of_a_running_daemon(home: Home) -> None:
    with socket.socket(socket.AF_UNIX) as running:
        running.bind(str(home.folder / "uma.sock"))
        running.listen(1)
        found = home.run("install", "--now", "--", "--socket", "uma.sock")
    assert (found.returncode, "a daemon serves on" in found.stderr) == (2, True)
    assert not home.units.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt install systemd")
@pytest.mark.parametrize("folder", ["plain", "with spaces", "100%", "$HOME", "é"])
def test_systemd_accepts_the_units(tmp_path: Path, folder: str) -> None:
    program = tmp_path / folder / "python"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    arguments = ["serve", "--model", str(tmp_path / folder / "it's $a %m \\ model.gguf"), ";", ""]
    service = Service(command=[str(program), *arguments], socket=tmp_path / folder / "uma.sock", drain_s=30)
    for path, text in Systemd(tmp_path).files(service).items():
        path.write_text(text)
    found = subprocess.run(
        ["systemd-analyze", "--user", "verify", *map(str, Systemd(tmp_path).paths)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
