"""The units of systemd and the property list of launchd, as texts."""

from __future__ import annotations

import plistlib
import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.cli.service_units import MARK, Launchd, Service, Systemd, UnitError

SERVICE = Service(command=["/bin/python", "-m", "uma_trio", "serve"], socket=Path("/run/uma.sock"), drain_s=30)
SYSTEMD = Systemd(Path("/units"))
LAUNCHD = Launchd(Path("/agents"), Path("/logs"), uid=501)


def sections(text: str) -> dict[str, dict[str, str]]:
    """The options of a unit, by section."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert name not in section
            section[name] = value
    return found


def units(service: Service) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    socket, unit = SYSTEMD.files(service).values()
    return sections(socket), sections(unit)


def as_systemd_reads(line: str) -> list[str]:
    """The words of a command line, by the rules of systemd.service(5) and systemd.syntax(7)."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    found = []
    for quoted, plain in words:
        word = (
            re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), quoted) or plain
        )
        assert "%" not in word.replace("%%", ""), "a specifier"
        word = word.replace("%%", "%")
        if found:
            assert "$" not in word.replace("$$", ""), "a variable"
            word = word.replace("$$", "$")
        found.append(word)
    return found


def test_the_units_of_systemd() -> None:
    socket, unit = units(SERVICE)
    assert socket["Socket"]["ListenStream"] == "/run/uma.sock"
    assert (socket["Socket"]["SocketMode"], socket["Socket"]["DirectoryMode"]) == ("0600", "0700")
    assert socket["Install"] == {"WantedBy": "sockets.target"}
    assert as_systemd_reads(unit["Service"]["ExecStart"]) == SERVICE.command
    assert (unit["Service"]["Type"], unit["Service"]["KillMode"]) == ("notify", "mixed")
    assert unit["Unit"]["Requires"] == unit["Unit"]["After"] == unit["Install"]["Also"] == "uma-trio.socket"
    assert {path.name for path in SYSTEMD.paths} == {"uma-trio.socket", "uma-trio.service"}
    assert all(text.startswith(f"# {MARK}\n") for text in SYSTEMD.files(SERVICE).values())


def test_the_time_to_stop_is_longer_than_the_daemon_takes() -> None:
    _, unit = units(attrs.evolve(SERVICE, drain_s=100))
    assert int(unit["Service"]["TimeoutStopSec"]) > 2 * 100
    assert (
        plistlib.loads(LAUNCHD.files(attrs.evolve(SERVICE, drain_s=100))[LAUNCHD.paths[0]].encode())["ExitTimeOut"]
        > 200
    )


def test_a_driver_that_needs_a_setuid_program_is_not_cut_off() -> None:
    assert units(SERVICE)[1]["Service"]["NoNewPrivileges"] == "yes"
    unit = units(attrs.evolve(SERVICE, hardened=False))[1]["Service"]
    assert not {"NoNewPrivileges", "RestrictSUIDSGID", "SystemCallArchitectures"} & set(unit)


@all_cases(
    "argument",
    ["", "a b", "%h", "100%", "$HOME", "${HOME}", 'say "hi"', "it's", "back\\slash", "é", ";", "tab\t", "a\nb"],
)
def test_an_argument_reaches_the_program_as_it_is(argument: str) -> None:
    command = ["/a b/100%/$x/python", "--model", argument]
    _, unit = units(attrs.evolve(SERVICE, command=command))
    assert as_systemd_reads(unit["Service"]["ExecStart"]) == command


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs", "Cc", "Zl", "Zp"]))))
def test_any_arguments_reach_the_program(arguments: list[str]) -> None:
    command = ["/bin/python", *arguments]
    _, unit = units(attrs.evolve(SERVICE, command=command))
    assert as_systemd_reads(unit["Service"]["ExecStart"]) == command


def test_a_socket_may_have_spaces_and_percent_signs() -> None:
    socket, _ = units(attrs.evolve(SERVICE, socket=Path("/my files/100%/uma.sock")))
    assert socket["Socket"]["ListenStream"] == "/my files/100%%/uma.sock"


@all_cases(
    "changes",
    [
        {"socket": Path("/run/a\nb")},
        {"socket": Path("/run/a ")},
        {"socket": Path("/run/a\\")},
        {"socket": Path("/run/\udcff")},
        {"command": ["/it's/python"]},
        {"command": ['/a"b/python']},
        {"command": ["/bin/python", "\udcff"]},
    ],
)
def test_what_systemd_cannot_read_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnitError):
        SYSTEMD.files(attrs.evolve(SERVICE, **changes))  # type: ignore[arg-type]


def test_the_commands_of_systemd() -> None:
    def words(commands: object) -> list[str]:
        return [" ".join(command).removeprefix("systemctl --user ") for command in commands]  # type: ignore[attr-defined]

    assert words(SYSTEMD.start(SERVICE, replaced=False)) == ["daemon-reload", "enable --now uma-trio.socket"]
    assert words(SYSTEMD.start(SERVICE, replaced=True)) == [
        "daemon-reload",
        "stop uma-trio.service uma-trio.socket",
        "enable --now uma-trio.socket",
    ]
    with_http = attrs.evolve(SERVICE, serves_http=True)  # nobody connects to the Unix socket before
    assert words(SYSTEMD.start(with_http, replaced=False))[-1] == "enable --now uma-trio.socket uma-trio.service"
    assert words(SYSTEMD.stop(SYSTEMD.paths)) == ["disable --now uma-trio.socket uma-trio.service"]
    assert SYSTEMD.is_running("● uma-trio.socket\n     Active: active (listening) since Sun\n")
    assert not SYSTEMD.is_running("● uma-trio.socket\n     Active: inactive (dead)\n")


def test_the_property_list_of_launchd() -> None:
    service = attrs.evolve(SERVICE, command=["/a <b>/python", "--model", "a & b"])
    [(path, text)] = LAUNCHD.files(service).items()
    assert path == Path("/agents/uma-trio.plist")
    assert MARK in text
    found = plistlib.loads(text.encode())
    assert found["ProgramArguments"] == ["/a <b>/python", "--model", "a & b", "--socket", "/run/uma.sock"]
    assert (found["Label"], found["KeepAlive"], found["RunAtLoad"]) == ("uma-trio", {"SuccessfulExit": False}, True)
    assert found["StandardErrorPath"] == "/logs/uma-trio.log"
    with pytest.raises(UnitError):
        LAUNCHD.files(attrs.evolve(SERVICE, command=["/bin/python", "\x01"]))


def test_the_commands_of_launchd() -> None:
    load = ("launchctl", "bootstrap", "gui/501", "/agents/uma-trio.plist")
    unload = ("launchctl", "bootout", "gui/501/uma-trio")
    assert [*LAUNCHD.start(SERVICE, replaced=False)] == [load]
    assert [*LAUNCHD.start(SERVICE, replaced=True)] == [unload, load]
    assert [*LAUNCHD.stop(LAUNCHD.paths)] == [unload]
    assert LAUNCHD.is_running("\tstate = running\n")
