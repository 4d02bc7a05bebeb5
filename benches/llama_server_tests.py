"""Run llama.cpp's own tests of llama-server, unmodified, against uma-trio's HTTP gateway, and say why some fail.

python benches/llama_server_tests.py
python benches/llama_server_tests.py test_tokenize test_completion

The tests are those of the pinned source in build/llama.cpp; ./build_llama.sh --peers puts it there and builds
llama-server.  They run twice, with the embedded model each time.  A test that llama-server fails at the same assertion
expects another model's text.  Any other failure needs a reason in ``llama_server_reasons.py``; without one, the exit
code is 1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import attrs
import click
from command import bench, carry_out
from llama_server_reasons import NOT_OFFERED, OFFERED, REASONS
from rigs import free_port, peer, peers_option

ROOT: Final = Path(__file__).resolve().parent.parent
SUITE: Final = ROOT / "build" / "llama.cpp" / "tools" / "server" / "tests"
TIMEOUT_S: Final = 180
"""For one test."""
FLAGS: Final = ("-p", "llama_server_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-q", "--tb=line", "-m", "not slow")  # fmt: skip

Verdict = Literal["pass", "other text", "explained", "not offered", "unexplained"]
STATUSES: Final = re.compile(r"assert \d{3} [!=]= \d{3}")


@attrs.frozen
class Result:
    """What became of a test with one server."""

    outcome: str
    line: str = ""
    why: str = ""

    def __str__(self) -> str:
        return {"passed": "pass", "skipped": "skip"}.get(self.outcome, "fail")

    def fails_like(self, other: Result) -> bool:
        """Whether both failed at one assertion, and with one status if that is what the assertion is about."""
        if {self.outcome, other.outcome} != {"failed"} or self.line != other.line:
            return False
        return self.why == other.why or not (STATUSES.search(self.why) or STATUSES.search(other.why))


@attrs.frozen
class Row:
    """A test with both servers."""

    test: str
    theirs: Result
    ours: Result

    @property
    def judgement(self) -> tuple[Verdict, str]:
        """How the outcome with uma-trio counts, and why."""
        if self.ours.outcome == "passed":
            return "pass", ""
        if self.ours.outcome == "skipped":
            return "not offered", self.ours.why
        for tests, why, reason in REASONS:
            if re.search(tests, self.test) and re.search(why, self.ours.why):
                return "explained", reason
        if self.ours.fails_like(self.theirs):
            return "other text", "llama-server fails alike: another model's text or tokens"
        return "unexplained", f"line {self.ours.line}: {self.ours.why}; llama-server: {self.theirs.why or self.theirs}"


def run_suite(server: str, files: Sequence[str], program: Path, folder: Path) -> dict[str, Result]:
    """Run the suite with a server, one file after another; returns the results by test.

    Args:
        folder: has a file of results for each file of tests that has run, which does not run again.
    """
    results_by_test = {}
    for name in files:
        results = folder / f"{server}.{name}.jsonl"
        if not results.exists():
            _run_file(server, name, program, results)
        for line in results.read_text().splitlines():
            fields = json.loads(line)
            test = fields.pop("test")
            results_by_test[test] = Result(**fields)
    return results_by_test


def _run_file(server: str, name: str, program: Path, results: Path) -> None:
    click.echo(f"{server}: {name}", err=True)
    unfinished = results.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'benches'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SUITE_SERVER": server,
        "SUITE_RESULTS": str(unfinished),
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PORT": str(free_port()),
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, f"--timeout={TIMEOUT_S}", f"--basetemp={folder}/pytest"]
        command = [sys.executable, "-m", "pytest", *flags, f"unit/{name}.py"]
        done = subprocess.run(command, cwd=SUITE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise click.ClickException(f"{name} with {server}:\n{(done.stdout + done.stderr)[-2000:]}")
    unfinished.rename(results)


def summary(rows: Sequence[Row]) -> str:
    """The outcomes, and why uma-trio does not pass some tests, as two tables."""
    verdicts = Counter(row.judgement[0] for row in rows)
    theirs = Counter(str(row.theirs) for row in rows)
    compared = [row for row in rows if row.theirs.outcome == "passed" and row.judgement[0] != "not offered"]
    both = sum(row.ours.outcome == "passed" for row in compared)
    tests: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        verdict, reason = row.judgement
        if verdict not in ("pass", "other text"):
            name = row.test.partition("[")[0].rpartition("::")[2]
            tests.setdefault((reason.replace("|", " "), str(row.ours)), Counter())[name] += 1
    lines = [
        "| | tests |",
        "|---|---:|",
        f"| all | {len(rows)} |",
        f"| llama-server with this model: pass / fail / skip | {theirs['pass']} / {theirs['fail']} / {theirs['skip']} |",
        f"| uma-trio: pass | {verdicts['pass']} |",
        f"| uma-trio: fails as llama-server does, since the model is another one | {verdicts['other text']} |",
        f"| uma-trio: skipped, because it is not offered, needs a vision model, or the suite skips it | {verdicts['not offered']} |",
        f"| uma-trio: fails for another reason | {verdicts['explained']} |",
        f"| uma-trio: fails without a known reason | {verdicts['unexplained']} |",
        f"| of those that llama-server passes and that use only what is offered: uma-trio passes | {both} of {len(compared)} |",
        "",
        "| reason | uma-trio | tests |",
        "|---|---|---|",
    ]
    for (reason, outcome), names in tests.items():
        listed = (f"{name} ({count})" if count > 1 else name for name, count in names.items())
        lines.append(f"| {reason} | {outcome} | {', '.join(listed)} |")
    lines += [f"| {reason} | left out | {file} |" for file, reason in NOT_OFFERED.items()]
    return "\n".join(lines)


@bench()
@click.argument("files", nargs=-1, type=click.Choice(OFFERED))
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep results in this folder, and go on from there.",
)
@peers_option()
def main(files: tuple[str, ...], keep: Path | None, peers: Path) -> None:
    """Run llama.cpp's tests of llama-server against llama-server and uma-trio."""
    if not SUITE.is_dir():
        raise click.ClickException(f"there is no {SUITE}: run ./build_llama.sh --peers")

    async def program() -> Path:
        return peer(peers, "llama-server")

    llama_server = carry_out(program).resolve()
    chosen = files or OFFERED
    with tempfile.TemporaryDirectory(prefix="suite-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        theirs = run_suite("llama-server", chosen, llama_server, folder)
        ours = run_suite("uma-trio", chosen, llama_server, folder)
    absent = Result("skipped", why="did not run")
    rows = [Row(test, theirs.get(test, absent), result) for test, result in ours.items()]
    for row in rows:
        verdict, reason = row.judgement
        click.echo(f"{verdict:12} {row.test}  {reason}")
    click.echo(f"\n{summary(rows)}")
    if any(row.judgement[0] == "unexplained" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
