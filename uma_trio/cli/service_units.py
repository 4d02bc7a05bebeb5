"""The files and commands that make the daemon a service of systemd or launchd.  Pure: text in, text out.

Sources: systemd.service(5), systemd.socket(5), systemd.exec(5), systemd.syntax(7); launchd.plist(5), launchctl(1).
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import attrs

MARK: Final = "Written by uma-trio service install; uma-trio service uninstall removes it."
"""A file without it is not ours, so it is neither replaced nor removed."""

WATCHDOG_S: Final = 60
START_S: Final = 900
"""A large model may be read from a slow disk."""
STOP_MARGIN_S: Final = 30

HARDENING: Final = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
)
"""Options that work in a user's service and that the daemon does not notice.

Left out: PrivateTmp, because models and sockets may be in /tmp; ProtectHome and ProtectSystem, because models may be
anywhere; MemoryDenyWriteExecute, because GPU drivers compile code.
"""


class UnitError(ValueError):
    """A path or an argument cannot be written into a unit."""


@attrs.frozen(kw_only=True)
class Service:
    """What to install."""

    command: Sequence[str]
    """The program with its arguments, without ``--socket``."""
    socket: Path
    drain_s: float
    """How long the daemon may take to complete requests, and again to save sessions, when it stops."""
    hardened: bool = True
    """Whether the daemon may go without setuid programs.  NVIDIA's driver loads its module through one."""
    serves_http: bool = False
    """Whether the daemon has a gateway.  Then it must run before a client of the socket comes."""

    @property
    def stop_s(self) -> int:
        """Seconds until a daemon that does not stop is killed."""
        return round(2 * self.drain_s) + STOP_MARGIN_S


class Manager(Protocol):
    """A service manager: where its files are, and which commands it has."""

    @property
    def silent(self) -> str:
        """What to say if it does not answer."""

    def probe(self) -> Sequence[str]:
        """The command that it answers if it runs."""

    def answers(self, shown: str, error: str) -> bool:
        """Whether that command was answered."""

    @property
    def paths(self) -> Sequence[Path]: ...
    def files(self, service: Service) -> Mapping[Path, str]: ...
    def start(self, service: Service, *, replaced: bool) -> Sequence[Sequence[str]]:
        """Commands that start what is installed.  ``replaced``: other files were installed before."""

    def stop(self, installed: Sequence[Path]) -> Sequence[Sequence[str]]:
        """Commands that stop what is ``installed``, some of ``paths``, before these files are removed."""

    def forget(self) -> Sequence[Sequence[str]]:
        """Commands after its files were removed."""

    def status(self) -> Sequence[str]:
        """The command that says how it is."""

    def is_running(self, shown: str) -> bool:
        """Whether that command has shown a service that clients can use."""


@attrs.frozen
class Systemd:
    """The systemd of a user.

    Args:
        folder: the user's units.
    """

    folder: Path

    SOCKET = "uma-trio.socket"
    SERVICE = "uma-trio.service"

    @property
    def silent(self) -> str:
        return (
            "the systemd of this user does not run: this may be a container, a shell without a login, or WSL without "
            "systemd=true in /etc/wsl.conf"
        )

    def probe(self) -> Sequence[str]:
        return ("systemctl", "--user", "is-system-running")

    def answers(self, shown: str, error: str) -> bool:
        return shown.strip() not in ("offline", "unknown") and "Failed to connect" not in error

    @property
    def paths(self) -> Sequence[Path]:
        return [self.folder / self.SOCKET, self.folder / self.SERVICE]

    def files(self, service: Service) -> Mapping[Path, str]:
        """Raises UnitError if a path or an argument cannot be written."""
        path = str(service.socket)
        if not path.isprintable() or path.endswith((" ", "\\")):  # a backslash would continue the line
            raise UnitError(
                f"systemd cannot listen on {path!r}: choose a --socket of printable characters that ends with neither a "
                "space nor a backslash"
            )
        listen = path.replace("%", "%%")
        socket = f"""\
# {MARK}
[Unit]
Description=Socket of the uma-trio LLM daemon

[Socket]
ListenStream={listen}
SocketMode=0600
DirectoryMode=0700
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""
        hardening = "\n".join(("", *HARDENING)) if service.hardened else ""
        unit = f"""\
# {MARK}
[Unit]
Description=uma-trio LLM daemon
Requires={self.SOCKET}
After={self.SOCKET}
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=notify
ExecStart={_exec_line(service.command)}
ExecReload=kill -HUP $MAINPID
# The daemon stops its children itself; a SIGTERM to all of them would cut running answers off.
KillMode=mixed
Restart=on-failure
RestartSec=2
# 2 is a wrong setting, which the next start would find again.
RestartPreventExitStatus=2
TimeoutStartSec={START_S}
TimeoutStopSec={service.stop_s}
WatchdogSec={WATCHDOG_S}
UMask=0077{hardening}

[Install]
WantedBy=default.target
Also={self.SOCKET}
"""
        return dict(zip(self.paths, (socket, unit), strict=True))

    def start(self, service: Service, *, replaced: bool) -> Sequence[Sequence[str]]:
        units = [self.SOCKET, self.SERVICE] if service.serves_http else [self.SOCKET]
        stop = [("systemctl", "--user", "stop", self.SERVICE, self.SOCKET)] if replaced else []
        return [
            ("systemctl", "--user", "daemon-reload"),
            *stop,
            ("systemctl", "--user", "enable", "--now", *units),
        ]

    def stop(self, installed: Sequence[Path]) -> Sequence[Sequence[str]]:
        return [("systemctl", "--user", "disable", "--now", *(path.name for path in installed))]

    def forget(self) -> Sequence[Sequence[str]]:
        return [("systemctl", "--user", "daemon-reload")]

    def status(self) -> Sequence[str]:
        return ("systemctl", "--user", "status", "--no-pager", "--lines=0", self.SOCKET, self.SERVICE)

    def is_running(self, shown: str) -> bool:
        return any(line.strip().startswith("Active: active") for line in shown.splitlines())


@attrs.frozen
class Launchd:
    """The launchd of a macOS user.  It keeps the daemon running; it does not open the socket for it.

    Args:
        folder: the user's agents.
        logs: folder for the daemon's log.
        uid: the user's id.
    """

    folder: Path
    logs: Path
    uid: int

    LABEL = "uma-trio"

    @property
    def paths(self) -> Sequence[Path]:
        return [self.folder / f"{self.LABEL}.plist"]

    def files(self, service: Service) -> Mapping[Path, str]:
        """Raises UnitError if a path or an argument cannot be written."""
        log = str(self.logs / "uma-trio.log")
        try:
            plist = plistlib.dumps(
                {
                    "Label": self.LABEL,
                    "ProgramArguments": [*service.command, "--socket", str(service.socket)],
                    "RunAtLoad": True,
                    "KeepAlive": {"SuccessfulExit": False},
                    "ProcessType": "Interactive",  # otherwise macOS gives the daemon less of the processor
                    "ExitTimeOut": service.stop_s,
                    "Umask": 0o077,
                    "StandardOutPath": log,
                    "StandardErrorPath": log,
                },
                sort_keys=False,
            ).decode()
        except ValueError as error:  # a control character, or bytes that are not UTF-8
            raise UnitError(f"a path or an argument cannot be written into {self.paths[0]}: {error}") from None
        head, brace, rest = plist.partition("<plist")
        return {self.paths[0]: f"{head}<!-- {MARK} -->\n{brace}{rest}"}

    def start(self, service: Service, *, replaced: bool) -> Sequence[Sequence[str]]:
        load = ("launchctl", "bootstrap", f"gui/{self.uid}", str(self.paths[0]))
        return [*self.stop(self.paths), load] if replaced else [load]

    def stop(self, installed: Sequence[Path]) -> Sequence[Sequence[str]]:
        return [("launchctl", "bootout", f"gui/{self.uid}/{self.LABEL}")]

    def forget(self) -> Sequence[Sequence[str]]:
        return []

    @property
    def silent(self) -> str:
        return f"launchd has no domain gui/{self.uid}: log in at the screen of this Mac first"

    def probe(self) -> Sequence[str]:
        return ("launchctl", "print", f"gui/{self.uid}")

    def answers(self, shown: str, error: str) -> bool:
        return bool(shown.strip()) or not error.strip()

    def status(self) -> Sequence[str]:
        return ("launchctl", "print", f"gui/{self.uid}/{self.LABEL}")

    def is_running(self, shown: str) -> bool:
        return "state = running" in shown


def _exec_line(command: Sequence[str]) -> str:
    """The value of ``ExecStart=``.  systemd replaces ``%`` and ``$``, also within quotes, but no ``$`` in the program."""
    program, *arguments = command
    if any(character in program for character in "'\"\\"):
        raise UnitError(
            f"systemd runs no program whose path has quotes or backslashes: install uma-trio elsewhere than {program}"
        )
    return " ".join([_quoted(program), *(_quoted(argument).replace("$", "$$") for argument in arguments)])


def _quoted(argument: str) -> str:
    if "\0" in argument or any("\ud800" <= character <= "\udfff" for character in argument):
        raise UnitError(f"{argument!r} cannot be written into a unit: it is not UTF-8")
    if re.fullmatch(r"[\w/.,:=@+-]+", argument, re.ASCII):
        return argument
    escapes = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in argument) + '"'
