"""Run the reference implementation's samples and clients, unmodified, against this daemon, and print what each gives.

It takes a checkout of the reference at commit 519d77cf and fetches nothing.  It needs the Python packages
``requests`` and ``posix_ipc``, and ``tsc`` of TypeScript for the samples that are TypeScript.

    git clone https://github.com/microsoft/aici reference && git -C reference checkout 519d77cf
    npm install typescript@5
    python benches/aici_reference.py --reference reference --tsc node_modules/.bin/tsc
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import click
import numpy as np
import trio

from uma_trio.aici.controllers import shipped
from uma_trio.demo.temporary_daemon import temporary_daemon

MAX_TOKENS: Final = 300
"""The most of an answer.  The reference's own tests have 2000, and end where a model of 13 B ends."""
COMMS_S: Final = 120.0
MAX_STEPS: Final = 50
MODEL: Final = "depends on the model"
NOT_RUN: Final = "not run"
WANTED: Final = {"hello": r"everything is \d\d$", "hellots": r"^Hello( [A-Z]+)?"}
"""What the text of a sample without a check of its own must look like."""

BEGIN: Final = re.compile(r"^(start|test)\(.*", re.MULTILINE)
TEST: Final = re.compile(r"^async function (test[A-Z_]\w*)\(", re.MULTILINE)
WRONG_TEXT: Final = re.compile(r"AssertionError|the variable \w+ is|a list of texts, at least one")
"""How a program ends whose model writes other text than the model of the sample's author."""
FOREIGN_ERRORS: Final = (RuntimeError, OSError, LookupError, TypeError, ValueError, AssertionError)
"""What the reference's clients raise."""


@attrs.frozen
class Case:
    """A line of the table."""

    name: str
    result: str
    reason: str = ""


def programs(folder: Path) -> Iterator[tuple[str, str]]:
    """The samples: name -> program.  One with several tests becomes a program for each, as in the reference's driver."""
    for file in sorted(folder.glob("*.js")):
        text = file.read_text(encoding="utf-8")
        tests = TEST.findall(text)
        if not tests:
            yield file.stem, text
        for test in tests:
            yield f"{file.stem}: {test}", f"{BEGIN.sub('', text)}\ntest({test});\n"


def transpiled(samples: Path, tsc: str | None, target: Path) -> list[Case]:
    """Put the samples into ``target`` as JavaScript; what is missing is a case."""
    if tsc is None:
        for file in samples.glob("*.js"):
            shutil.copy(file, target)
        return [
            Case(f"jsctrl {file.name}", NOT_RUN, "needs tsc")
            for file in samples.glob("[!.]*.ts")
            if ".d." not in file.name
        ]
    command = [tsc, "--project", str(samples), "--outDir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [Case("tsc", "types", line) for line in done.stdout.splitlines()[:3]]


def run_program(rest: Any, name: str, program: str) -> Case:
    try:
        answer = rest.run_controller(controller="jsctrl", controller_arg=program, max_tokens=MAX_TOKENS)
    except FOREIGN_ERRORS as error:
        return Case(f"jsctrl {name}", "FAIL", f"{type(error).__name__}: {error}")
    logs, text, error = "\n".join(answer["logs"]), answer["text"][0], answer["error"] or ""
    ends = {fork.get("finish_reason") for frame in answer["response"] for fork in frame.get("forks", [])} - {None}
    case = f"jsctrl {name}"
    if WRONG_TEXT.search(error):
        return Case(case, MODEL, error.removeprefix("*** failed: ").splitlines()[0])
    if error:
        return Case(case, "FAIL", error.splitlines()[0])
    if ends - {"aici-stop"}:
        return Case(case, MODEL, f"the text has not ended after {MAX_TOKENS} tokens: {', '.join(sorted(ends))}")
    if name in WANTED and not re.search(WANTED[name], text):
        return Case(case, "FAIL", f"the text is {text!r}")
    if name not in WANTED and "TEST OK" not in logs and ": " in name:
        return Case(case, "FAIL", f"the logs end with {logs[-80:]!r}")
    return Case(case, "pass", text[-40:].replace("\n", "\\n"))


def client_cases(rest: Any, wasm: Path) -> Iterator[Case]:
    """The REST client: upload, tags, and runs without and with a controller."""
    module = ""

    def upload() -> bool:
        nonlocal module
        module = rest.upload_module(str(wasm))
        return len(module) == 64

    def tags() -> bool:
        rest.tag_module(module, ["mine"])
        return "mine" in [listed["tag"] for listed in rest.list_tags()]

    def plain() -> bool:
        answer = rest.run_controller(controller="none", controller_arg="Once upon a time", max_tokens=5)
        return bool(answer["text"][0]) and answer["usage"]["sampled_tokens"] == 5

    def uploaded() -> bool:
        answer = rest.run_controller(controller="mine", controller_arg="Is it?", max_tokens=50)
        return answer["text"][0] in ("Is it?\nyes", "Is it?\nno")

    def refused() -> bool:
        try:
            rest.run_controller(controller="nothing")
        except RuntimeError as error:
            return "nothing" in str(error)
        return False

    for check in (upload, tags, plain, uploaded, refused):
        yield checked(f"rest.py {check.__name__}", check)


def checked(name: str, check: Callable[[], bool]) -> Case:
    try:
        return Case(name, "pass" if check() else "FAIL")
    except FOREIGN_ERRORS as error:
        return Case(name, "FAIL", f"{type(error).__name__}: {error}")


def reference_module(reference: Path, name: str) -> Any:
    sys.path.insert(0, str(reference / "py"))
    sys.modules.setdefault("ujson", types.ModuleType("ujson"))
    sys.modules["ujson"].__dict__.update(dumps=json.dumps, loads=json.loads)
    return importlib.import_module(f"pyaici.{name}")


def drive_runtime(reference: Path, folder: Path) -> Iterator[Case]:
    """The Python side of the shared memory protocol, as an engine that takes the first token that may come."""
    comms = reference_module(reference, "comms")
    runtime = folder / "aicirt"
    runtime.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m uma_trio aicirt "$@"\n', encoding="utf-8")
    runtime.chmod(0o755)
    runner = comms.AiciRunner(str(runtime), tokenizer="embedded", json_size=8, bin_size=16, pref="/ref0-")
    yield Case(
        "comms.py start, ping, tokens", "pass" if runner.vocab_size > 256 else "FAIL", f"{runner.vocab_size} tokens"
    )
    binary = runner.side_cmd.exec("mk_module", {"binary": comms.base64.b64encode(shipped()["yesno"]).decode()})
    module = binary["data"]["module_id"]
    yield Case("comms.py mk_module", "pass" if len(module) == 64 else "FAIL")
    runner.instantiate("r", [1], module, "")
    runner.assign_seq_id("r", 1)
    steps = tokens = 0
    while steps < MAX_STEPS:
        steps += 1
        runner.exec_post_pre()
        if runner.get_seqs_to_stop():
            break
        _, _, appended = runner.pre_status(1)
        tokens += len(appended)
        runner.add_mid(1)
        runner.exec_mid()
        [bias] = np.array(runner.recv_logit_bias())
        spliced, backtrack = runner.mid_status(1)
        chosen = spliced or [int(np.argmax(bias))]
        tokens += len(chosen)
        runner.tokens_generated(1, chosen, backtrack)
    said = runner.seq_logs(1)
    ended = steps < MAX_STEPS and tokens > 0 and not said["error"]
    yield Case("comms.py a controller to its end", "pass" if ended else "FAIL", said["error"] or f"{steps} steps")
    runner.stop()
    yield Case("comms.py stop", "pass")


def comms_cases(reference: Path) -> list[Case]:
    """The same in a process of its own, as the reference's client waits for ever for a runtime that has died."""
    command = [sys.executable, __file__, "--reference", str(reference), "--comms"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMS_S, check=False)
    except subprocess.TimeoutExpired:
        return [Case("comms.py", "FAIL", f"no end after {COMMS_S:g} s")]
    cases = [Case(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return [*cases, *([Case("comms.py", "FAIL", done.stderr.strip()[-200:])] if done.returncode else [])]


def all_cases(reference: Path, tsc: str | None, port: int) -> Iterator[Case]:
    rest = reference_module(reference, "rest")
    rest.base_url, rest.log_level = f"http://127.0.0.1:{port}/v1/", 0
    with tempfile.TemporaryDirectory(prefix="uma-") as name:
        folder = Path(name)
        (wasm := folder / "yesno.wasm").write_bytes(shipped()["yesno"])
        yield from client_cases(rest, wasm)
        (target := folder / "samples").mkdir()
        yield from transpiled(reference / "controllers/jsctrl/samples", tsc, target)
        for sample, program in programs(target):
            yield run_program(rest, sample, program)
    for file in sorted((reference / "controllers/pyctrl/samples").glob("*.py")):
        yield Case(f"pyctrl {file.name}", NOT_RUN, "uma-trio has no controller that runs Python")
    yield from comms_cases(reference)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def with_daemon(reference: Path, tsc: str | None) -> bool:
    """Print the cases as they come; return whether none failed."""
    port, failed = free_port(), False
    flags = ["--http", str(port)]

    def show() -> bool:
        failed = False
        for case in all_cases(reference, tsc, port):
            failed |= case.result == "FAIL"
            click.echo(f"| {case.name} | {case.result} | {case.reason} |")
        return failed

    async with temporary_daemon(flags):
        while True:
            with trio.move_on_after(0.1):
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    pass
            await trio.sleep(0.1)
        failed = await trio.to_thread.run_sync(show)
    return not failed


@click.command()
@click.option(
    "--reference", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path), required=True
)
@click.option(
    "--tsc", default=shutil.which("tsc"), help="The compiler of TypeScript.  [default: tsc, if it is installed]"
)
@click.option("--comms", is_flag=True, hidden=True)
def main(reference: Path, tsc: str | None, comms: bool) -> None:
    """Run the samples and clients of the reference implementation, and print a table.  Exits with 1 if one fails."""
    if not comms:
        click.echo("| case | result | |\n|---|---|---|")
        sys.exit(0 if trio.run(with_daemon, reference, tsc) else 1)
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        for case in drive_runtime(reference, Path(folder)):
            print(json.dumps(attrs.asdict(case)), flush=True)


if __name__ == "__main__":
    main()
