"""``uma-trio service``: run the daemon as a service of the user, from login or from the first client on."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem, ShellComplete

from uma_trio.cli import SuggestingGroup
from uma_trio.cli.exits import FAILED
from uma_trio.cli.stdio import fail

if TYPE_CHECKING:
    from uma_trio.cli.service_units import Manager, Service
    from uma_trio.config import Config

INSTEAD: Final = (
    "Start the daemon yourself with uma-trio serve, or have it started by what starts other programs here, such as a "
    "container's command"
)
LINGERING: Final = Path("/var/lib/systemd/linger")
"""Has a file for each user whose services run without a login."""


@click.group("service", cls=SuggestingGroup)
def command() -> None:
    """Run the daemon as a service: of systemd on Linux, of launchd on macOS.

    systemd listens on the socket.  The first client starts the daemon and waits until the model is loaded.  A daemon
    that crashes or hangs is started again.  launchd starts the daemon at login.  docs/CONFIG.md has the details.

    \b
      uma-trio service install --now -- --model ~/models/some-model.gguf --ctx 32k
      uma-trio service status
      uma-trio service uninstall
    """


def _complete_flags(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What uma-trio serve would complete."""
    from uma_trio.cli.serve import command as serve

    return ShellComplete(serve, {}, "uma-trio serve", "").get_completions([*context.params["flags"]], incomplete)


@command.command()
@click.option("--dry-run", is_flag=True, help="Print the files and the commands, and change nothing.")
@click.option("--now", is_flag=True, help="Also run the commands that start the service.")
@click.argument(
    "flags", metavar="[-- FLAGS OF SERVE]", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_flags
)
def install(flags: Sequence[str], dry_run: bool, now: bool) -> None:
    """Write the units, and print the command that starts them.

    Where no service manager runs, as in most containers, nothing is written.  Everything after -- is passed to uma-trio serve.  The flags are checked now, and relative paths become absolute.  The
    service runs this installation of uma-trio.  Variables of this shell do not reach it.

    \b
      uma-trio service install --dry-run -- --model model.gguf
      uma-trio service install --now -- --config uma.yaml
    """
    from uma_trio.cli.service_units import UnitError
    from uma_trio.connect.connector import can_connect

    manager, service = _manager(), _service(flags)
    try:
        files = manager.files(service)
    except UnitError as error:
        raise click.UsageError(str(error)) from None
    before = {path: _read_own(path) for path in files}
    replaced = any(text is not None and text != files[path] for path, text in before.items())
    commands = manager.start(service, replaced=replaced)
    if dry_run:
        for path, text in files.items():
            click.echo(f"# {path}\n{text}")
        _print_commands(commands)
        return
    if (missing := _missing(manager)) is not None:
        fail("service", f"nothing was installed: {missing}")
    if now and not any(before.values()) and can_connect(service.socket):
        raise click.UsageError(f"a daemon serves on {service.socket} already; stop it, and install the service again")
    for path, text in files.items():
        _write(path, text)
        click.echo(f"{'replaced' if before[path] else 'wrote'} {path}")
    ignored = sorted(name for name in os.environ if name.startswith("UMA_") and name != "UMA_SOCKET")
    if ignored:
        click.echo(f"not part of the service: {', '.join(ignored)}; give the flags of serve after --", err=True)
    if not now:
        _print_commands(commands)
    elif not all(_run(command_line) for command_line in commands):  # stops at the first that fails
        sys.exit(FAILED)
    click.echo(f"clients find the daemon at {service.socket}")
    if sys.platform != "darwin" and not _lingers():
        click.echo("the service ends when you log out; to keep it running: loginctl enable-linger")


@command.command()
def uninstall() -> None:
    """Stop the service and remove the units that install has written.

    Sessions and settings stay.  A unit that somebody else has written stays, too.
    """
    manager = _manager()
    ours: list[Path] = []
    foreign: list[click.UsageError] = []
    for path in manager.paths:
        try:
            if _read_own(path) is not None:
                ours.append(path)
        except click.UsageError as error:
            foreign.append(error)
    if foreign and not ours:
        raise foreign[0]
    if not ours:
        click.echo("the service is not installed")
        return
    is_there = _missing(manager) is None  # otherwise the service does not run
    succeeded = [_run(command_line) for command_line in manager.stop(ours)] if is_there else []
    for path in ours:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise click.UsageError(f"cannot remove {path}: {error.strerror}") from None
        click.echo(f"removed {path}")
    succeeded += [_run(command_line) for command_line in manager.forget()] if is_there else []
    for reason in foreign:
        click.echo(f"uma-trio service: this unit stays: {reason}", err=True)
    sys.exit(0 if all(succeeded) and not foreign else FAILED)


@command.command()
def status() -> None:
    """Show whether the service is installed, listens and runs.

    Exit codes: 0 clients can use the service, 1 they cannot.
    """
    manager = _manager()
    missing = [path for path in manager.paths if not path.exists()]
    if missing:
        click.echo(f"not installed: there is no {missing[0]}; uma-trio service install writes it")
        sys.exit(FAILED)
    if (reason := _missing(manager)) is not None:
        fail("service", f"the service is installed and cannot run: {reason}")
    output = _output(manager.status())
    click.echo(output.stdout or output.stderr, nl=False)
    sys.exit(0 if manager.is_running(output.stdout) else FAILED)


# -- what to install ----------------------------------------------------------------------------------


def _manager() -> Manager:
    from uma_trio.cli.service_units import Launchd, Systemd

    home = Path.home()
    if sys.platform == "darwin":
        return Launchd(home / "Library" / "LaunchAgents", home / "Library" / "Logs", os.getuid())
    config = os.environ.get("XDG_CONFIG_HOME", "")
    # the XDG Base Directory Specification: a relative path is ignored
    return Systemd((Path(config) if os.path.isabs(config) else home / ".config") / "systemd" / "user")


def _service(flags: Sequence[str]) -> Service:
    """Check the flags of ``serve``, the model and the library.

    Raises:
        UsageError: the daemon would not start with them.
    """
    from uma_trio.cli.model_option import located
    from uma_trio.cli.service_units import Service
    from uma_trio.config import ConfigError, models_of
    from uma_trio.daemon.prompts.chosen_template import choose_template
    from uma_trio.engine_link.installed import LibraryProblem, read_stamp
    from uma_trio.engine_link.load_errors import ModelError, explained
    from uma_trio.hub.errors import HubError
    from uma_trio.models.gguf_check import check_gguf
    from uma_trio.models.packaged import model_path
    from uma_trio.processes.interpreter import PYTHON
    from uma_trio.protocol.address import GIVE_A_SHORTER_PATH, default_socket_path, too_long

    arguments, settings = _serve_arguments(flags)
    try:
        settings = located(settings, may_pull=False)
        for served in models_of(settings):
            model = model_path(served.model.model)
            with explained(model):
                check_gguf(model)
        if settings.model.chat_template is not None:
            choose_template(settings.model.chat_template)
        stamp = read_stamp(settings.model.llama_dir)
    except (ModelError, LibraryProblem, HubError, ConfigError) as error:
        raise click.UsageError(str(error)) from None
    socket = Path(os.path.abspath(settings.listen.socket or default_socket_path()))
    if reason := too_long(socket):
        raise click.UsageError(f"{reason}; {GIVE_A_SHORTER_PATH}")
    limits = settings.limits
    hand_over_s = limits.drain_hand_over_s if settings.http.peers else 0.0
    # faulthandler: a daemon that the watchdog ends leaves in the log where it was
    program = [*PYTHON, "-X", "faulthandler", "-m", "uma_trio", "serve"]
    return Service(
        command=[*program, *arguments],
        socket=socket,
        drain_s=limits.drain_notice_s + hand_over_s + limits.drain_timeout_s,
        hardened="cuda" not in (stamp.backend, *stamp.plugins),
        serves_http=settings.http.listen is not None,
    )


def _serve_arguments(flags: Sequence[str]) -> tuple[list[str], Config]:
    """Return the flags of ``serve`` with absolute paths and without ``--socket``, and the settings that they make.

    Raises:
        UsageError: they are wrong.
    """
    from uma_trio import config
    from uma_trio.cli.model_option import is_path_of_model
    from uma_trio.cli.serve import command as serve
    from uma_trio.daemon.prompts.chosen_template import built_in

    with serve.make_context("uma-trio serve", list(flags)) as context:
        given = {
            name: value
            for name, value in context.params.items()
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        }
    file = Path(os.path.abspath(given.pop("file"))) if "file" in given else None
    known = {setting.name: setting for setting in config.settings()}
    if unknown := sorted(given.keys() - known.keys()):
        raise click.UsageError(f"--{unknown[0].replace('_', '-')} is not for a service; leave it out")
    try:
        settings = config.load(file, {}, given)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None
    arguments = [] if file is None else ["--config", str(file)]
    for name, setting in known.items():
        value = getattr(getattr(settings, setting.section), setting.field)
        is_path = isinstance(value, Path)
        if name == "chat_template" and value is not None and value not in built_in():
            value, is_path = os.path.expanduser(value), True
        if name == "model" and value is not None and is_path_of_model(value):
            value, is_path = os.path.expanduser(value), True
        if name in given and name != "socket":
            if name == "model":
                for model in given[name]:
                    is_path = is_path_of_model(model)
                    arguments += [setting.flag, os.path.abspath(os.path.expanduser(model)) if is_path else model]
            elif isinstance(given[name], tuple):
                for item in given[name]:
                    arguments += [setting.flag, item]
            elif isinstance(value, bool):
                arguments.append(setting.flag if value else f"--no-{setting.flag[2:]}")
            else:
                arguments += [setting.flag, os.path.abspath(value) if is_path else str(given[name])]
        elif is_path and name not in given and not os.path.isabs(value):
            raise click.UsageError(
                f"{file}: {name} is {value}, and a service has no folder that this starts in: write an absolute path"
            )
    if "model" not in given:
        for entry in settings.models:
            if is_path_of_model(entry.model) and not os.path.isabs(os.path.expanduser(entry.model)):
                raise click.UsageError(
                    f"{file}: a model is {entry.model}, and a service has no folder that this starts in: write an "
                    "absolute path"
                )
    return arguments, settings


# -- files and commands -------------------------------------------------------------------------------


def _read_own(path: Path) -> str | None:
    """Read a file that ``install`` has written; ``None`` if it does not exist.

    Raises:
        UsageError: somebody else has written it.
    """
    from uma_trio.cli.service_units import MARK
    from uma_trio.files import read_text

    try:
        # systemctl makes symbolic links: one to /dev/null masks a unit, and disabling removes them
        text = read_text(path) if stat.S_ISREG(path.lstat().st_mode) else ""
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from None
    if MARK not in text:
        raise click.UsageError(f"{path} was not written by uma-trio service install; move it away first")
    return text


def _write(path: Path, text: str) -> None:
    from uma_trio.files import replace_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from None


def _lingers() -> bool:
    import pwd

    try:
        return (LINGERING / pwd.getpwuid(os.getuid()).pw_name).exists()
    except (KeyError, OSError):
        return False


def _print_commands(commands: Iterable[Sequence[str]]) -> None:
    for command_line in commands:
        click.echo(f"next: {shlex.join(command_line)}")


def _run(argv: Sequence[str]) -> bool:
    """Run a command and say so; returns whether it succeeded."""
    done = _output(argv)
    if done.returncode:
        click.echo(f"uma-trio service: {shlex.join(argv)} failed: {done.stderr.strip()}", err=True)
    else:
        click.echo(f"ran {shlex.join(argv)}")
    return done.returncode == 0


def _missing(manager: Manager) -> str | None:
    """Why the service manager cannot run the service, and what to do instead; ``None`` if it can."""
    [program, *arguments] = manager.probe()
    if shutil.which(program) is None:
        return f"there is no {program} here. {INSTEAD}"
    output = _output([program, *arguments])
    return None if manager.answers(output.stdout, output.stderr) else f"{manager.silent}. {INSTEAD}"


def _output(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", env=environment)
