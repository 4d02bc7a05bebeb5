"""``uma-trio doctor``: check the installation, and suggest fixes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from uma_trio.cli.completion import model_file
from uma_trio.cli.doctor.findings import Finding, guarded

if TYPE_CHECKING:
    from uma_trio.config import Config


@click.command("doctor")
@click.option("--config", "file", type=click.Path(), help="YAML file with settings, as for serve.")
@click.option(
    "--model",
    metavar="NAME|FILE",
    type=click.UNPROCESSED,
    shell_complete=model_file,
    help="Model to check: a GGUF file, or a name that uma-trio models lists. If not given, the one that serve would use.",
)
@click.option("--draft-model", metavar="NAME|FILE", help="Draft model to check with the model.")
@click.option("--socket", type=click.Path(), help="Socket to check. If not given, the one that serve would use.")
@click.option("--llama-dir", type=click.Path(), help="Folder of the built libllama.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--probe", "probing", hidden=True, is_flag=True)
def command(as_json: bool, probing: bool, **flags: str | None) -> None:
    """Check the installation and suggest fixes.

    Prints a line for each check, with a verdict (ok, warning or problem) and, if something is wrong, a fix.  The checks
    cover Python and its packages, the folders that the daemon writes, API keys, compute threads, the library and its devices, the
    model, the context of a request, memory, the layout of the KV cache, an answer of the model, and the socket.

    Code that could hang or crash runs in a separate process with a time limit.  Exit codes: 0 no problem (there may
    be warnings), 1 at least one problem.
    """
    if probing:
        from uma_trio.cli.doctor import probe

        probe.probe(_settings(**flags))
        return
    findings = []
    for finding in _examine(flags):
        findings.append(finding)
        if not as_json:
            _show(finding)
    worst = next((v for v in ("problem", "warning") if any(finding.verdict == v for finding in findings)), "ok")
    if as_json:
        click.echo(json.dumps({"verdict": worst, "checks": [attrs.asdict(finding) for finding in findings]}, indent=2))
    sys.exit(1 if worst == "problem" else 0)


def _show(finding: Finding) -> None:
    colour = {"ok": "green", "warning": "yellow", "problem": "red"}[finding.verdict]
    click.echo(f"{click.style(f'{finding.verdict:<8}', fg=colour)} {finding.name:<9} {finding.message}")
    if finding.fix:
        click.echo(f"{'':<19}fix: {finding.fix}")


def _settings(file: str | None, **flags: str | None) -> Config:
    from uma_trio import config

    return config.load(None if file is None else Path(file), os.environ, flags)


def _examine(flags: dict[str, Any]) -> Iterator[Finding]:
    """Run all checks."""
    from uma_trio import config
    from uma_trio.cli.doctor import daemon, environment, folders, model
    from uma_trio.cli.model_option import located
    from uma_trio.config import ConfigError
    from uma_trio.hub.errors import HubError

    yield from guarded("python", environment.check_python)
    yield from guarded("packages", environment.check_packages)
    try:
        settings = _settings(**flags)
    except ConfigError as error:
        yield Finding("config", "problem", str(error), "correct it; docs/CONFIG.md explains all settings")
        return
    yield from guarded("folders", folders.check_runtime_folder)
    yield from guarded("folders", lambda: folders.check_folders(settings))
    yield from guarded("keys", lambda: environment.check_keys(settings))
    yield from guarded("stamp", lambda: model.check_stamp(settings))
    yield from guarded("threads", lambda: environment.check_threads(settings))
    try:
        named = located(settings, may_pull=False)
    except HubError as error:
        yield Finding("model", "problem", error.reason, error.remedy)
    except ConfigError as error:
        yield Finding("config", "problem", str(error), "correct it; docs/CONFIG.md has an example")
    else:
        first, *others = config.models_of(named)
        flags = {**flags, "model": first.model.model, "draft_model": first.model.draft_model}
        yield from guarded("library", lambda: model.check_library_and_model(first, flags))
        for other in others:
            yield from guarded("model", functools.partial(model.check_file, other))
    yield from guarded("socket", lambda: daemon.check_socket(settings))
