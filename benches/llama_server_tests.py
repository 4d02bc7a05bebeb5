"""Run llama.cpp's own tests of llama-server, unmodified, against uma-trio's HTTP gateway, and say why some fail.

python benches/llama_server_tests.py --out docs/benchmarks/llama-server-tests.md
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import attrs
import click
from command import bench, carry_out
from llama_server_reasons import NOT_OFFERED, OFFERED, REASONS
from rigs import free_port, peer, peers_option

ROOT: Final = Path(__file__).resolve().parent.parent
SUITE: Final = ROOT / "build" / "llama.cpp" / "tools" / "server" / "tests"
COMMAND: Final = "python benches/llama_server_tests.py --out docs/benchmarks/llama-server-tests.md"
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
    found = {}
    for name in files:
        results = folder / f"{server}.{name}.jsonl"
        if not results.exists():
            _run_file(server, name, program, results)
        for line in results.read_text().splitlines():
            fields = json.loads(line)
            test = fields.pop("test")
            found[test] = Result(**fields)
    return found


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


def page(rows: Sequence[Row], *, is_resumed: bool) -> str:
    """The page of documentation.

    Args:
        is_resumed: results of earlier runs were there, perhaps of other versions.
    """
    verdicts = Counter(row.judgement[0] for row in rows)
    theirs = Counter(str(row.theirs) for row in rows)
    compared = [row for row in rows if row.theirs.outcome == "passed" and row.judgement[0] != "not offered"]
    both = sum(row.ours.outcome == "passed" for row in compared)
    lines = [
        "# llama-server's own tests",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}. `tools/server/tests` of the pinned llama.cpp, unmodified, with the embedded model in place of",
        "the models that the tests download. A plugin for pytest starts `uma-trio serve --http` where a test starts",
        "llama-server, with the flags that mean the same. Tests marked `slow` need large models and are left out.",
        "",
        "```sh",
        "./build_llama.sh --peers",
        COMMAND,
        "```",
        "",
        *(
            [
                "Some files ran earlier than others (`--keep`), with slightly older versions of the gateway and the plugin.",
                "",
            ]
            if is_resumed
            else []
        ),
        "| | tests |",
        "|---|---:|",
        f"| in the files below | {len(rows)} |",
        f"| llama-server with this model: pass / fail / skip | {theirs['pass']} / {theirs['fail']} / {theirs['skip']} |",
        f"| uma-trio: pass | {verdicts['pass']} |",
        f"| uma-trio: fails as llama-server does, since the model is another one | {verdicts['other text']} |",
        f"| uma-trio: skipped, because it is not offered, needs a vision model, or the suite skips it | {verdicts['not offered']} |",
        f"| uma-trio: fails for another reason, given below | {verdicts['explained']} |",
        f"| uma-trio: fails without a known reason | {verdicts['unexplained']} |",
        f"| of those that llama-server passes and that use only what is offered: uma-trio passes | {both} of {len(compared)} |",
        "",
        "## What differs from the suite's own way",
        "",
        "| | |",
        "|---|---|",
        "| both servers | the embedded model, one compute thread. Its answers are short, so tests of long ones fail with both |",
        "| llama-server | `--pooling mean` where a test sets none: the suite's own model for embeddings says it |",
        "| uma-trio: flags | `--http-any-model`, `--http-origins '*'` and `--metrics-compat llama-server`, which let it answer as llama-server does; `--batch-tokens` at least 32; a generated API key in place of the suite's |",
        "| uma-trio: starts | tests in a row with the same settings share a daemon, except those of caches, metrics and progress |",
        "| uma-trio: settings without a counterpart | `jinja`, `pooling`, `no_ui`, `server_metrics`, `server_slots` are ignored; others skip the test |",
        "",
        "## Tests that uma-trio does not pass",
        "",
        "The reason is that of the first assertion that fails; what comes after it in a test is not seen. Tests of one",
        "function with the same outcome share a line.",
        "",
        "| test | llama-server | uma-trio | reason |",
        "|---|---|---|---|",
    ]
    groups = Counter(
        (row.test.partition("[")[0].replace(".py::", ": "), str(row.theirs), str(row.ours), row.judgement[1])
        for row in rows
        if row.judgement[0] != "pass"
    )
    for (test, their_outcome, our_outcome, reason), count in groups.items():
        times = f" ({count})" if count > 1 else ""
        lines.append(f"| {test}{times} | {their_outcome} | {our_outcome} | {reason.replace('|', ' ')} |")
    lines += ["", "## Files that are left out", "", "| file | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in NOT_OFFERED.items()]
    return "\n".join(lines) + "\n"


@bench()
@click.argument("files", nargs=-1, type=click.Choice(OFFERED))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the page of documentation.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep results in this folder, and go on from there.",
)
@peers_option()
def main(files: tuple[str, ...], out: Path | None, keep: Path | None, peers: Path) -> None:
    """Run llama.cpp's tests of llama-server against llama-server and uma-trio."""
    if not SUITE.is_dir():
        raise click.ClickException(f"there is no {SUITE}: run ./build_llama.sh --peers")
    if out is not None and files:
        raise click.ClickException("--out needs all files")

    async def program() -> Path:
        return peer(peers, "llama-server")

    llama_server = carry_out(program).resolve()
    chosen = files or OFFERED
    with tempfile.TemporaryDirectory(prefix="suite-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        is_resumed = any(folder.iterdir())
        theirs = run_suite("llama-server", chosen, llama_server, folder)
        ours = run_suite("uma-trio", chosen, llama_server, folder)
    absent = Result("skipped", why="did not run")
    rows = [Row(test, theirs.get(test, absent), result) for test, result in ours.items()]
    for row in rows:
        verdict, reason = row.judgement
        click.echo(f"{verdict:12} {row.test}  {reason}")
    click.echo(dict(Counter(row.judgement[0] for row in rows)))
    if out is not None:
        out.write_text(page(rows, is_resumed=is_resumed))
    if any(row.judgement[0] == "unexplained" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
