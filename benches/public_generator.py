"""Run aiperf, NVIDIA's load generator, in an environment of its own, and read what it measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import trio
from rigs import LOG_TAIL, RivalError
from tokenizer_folder import write_folder

from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.tokenizer_json import CannotExpress

REQUIREMENT: Final = "aiperf==0.13.0"
"""One version, since its export has a format of its own.  It needs Python 3.11 to 3.13."""

INSTALL_S: Final = 900.0
RUN_S: Final = 3600.0
"""Limit for one run of a cell."""
WARM_UP_REQUESTS: Final = 2
MESSAGE_TOKENS: Final = 64
"""Tokens that a chat template puts around a question and its answer, at most."""
MAX_TOKENS: Final = 1_000_000
MAX_CONCURRENCY: Final = 1024

EXPORT: Final = "profile_export_aiperf.json"

SAMPLES: Final = (
    "The quick brown fox jumps over the lazy dog, doesn't it? I'LL say so.",
    "From fairest creatures we desire increase,\nThat thereby beauty's rose might never die,",
    "In 2026 it cost 1,234.50 dollars (or 99% of that) at 10:45.",
    "for (int i = 0; i < n; ++i) { total += values[i]; }",
    "naïve café, Ärger, 你好，世界, привет 🙂",
)
"""Texts whose ids are compared."""

_IDS: Final = (
    "import json, sys; from tokenizers import Tokenizer; t = Tokenizer.from_file(sys.argv[1]); "
    "print(json.dumps([t.encode(text).ids for text in json.load(sys.stdin)]))"
)

Endpoint = Literal["completions", "chat"]


# -- the environment ---------------------------------------------------------------------------


@attrs.frozen
class Generator:
    """A virtual environment that has aiperf."""

    folder: Path

    @property
    def program(self) -> Path:
        return self.folder / "bin" / "aiperf"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def given(folder: Path) -> Generator:
    """The environment in ``folder``.

    Raises:
        RivalError: aiperf is not installed in it.
    """
    generator = Generator(folder.absolute())
    if not os.access(generator.program, os.X_OK):
        raise RivalError(
            f"there is no {generator.program}: run {folder}/bin/pip install {REQUIREMENT}, or omit --aiperf"
        )
    return generator


async def made(folder: Path) -> Generator:
    """The environment in ``folder``, which is made and filled from a package index if it is not complete.

    Raises:
        RivalError: it cannot be made; the message has the remedy.
    """
    generator = Generator(folder)
    if os.access(generator.program, os.X_OK):
        return generator
    steps = (
        [sys.executable, "-m", "venv", str(folder)],
        [str(generator.python), "-m", "pip", "install", "--disable-pip-version-check", REQUIREMENT],
    )
    for step in steps:
        code, output = await _output(step, INSTALL_S)
        if code:
            raise RivalError(
                f"{REQUIREMENT} cannot be installed in {folder} (Python {sys.version_info.major}."
                f"{sys.version_info.minor}): {output[-LOG_TAIL:]}\nInstall it in an environment with Python 3.11 to "
                "3.13 and give its folder with --aiperf, or set PIP_INDEX_URL to an index that has it"
            )
    return given(folder)


async def _output(command: Sequence[str], limit_s: float, place: Path | None = None) -> tuple[int | None, str]:
    """Run a program that reads nothing, with ``place`` for its temporary files.

    Returns:
        Its exit code and output; the code is ``None`` if it was stopped after ``limit_s``.
    """
    env = None if place is None else {**os.environ, "TMPDIR": str(place)}
    with trio.move_on_after(limit_s):
        done = await trio.run_process(
            command, check=False, cwd=place, env=env, capture_stdout=True, stderr=subprocess.STDOUT
        )
        return done.returncode, done.stdout.decode(errors="replace").strip()
    return None, f"it did not end within {limit_s:g} s"


# -- its tokenizer -----------------------------------------------------------------------------


async def write_tokenizer(generator: Generator, model: Path, tokenizer: Tokenizer, folder: Path) -> int:
    """Write the tokenizer of ``model`` for aiperf.

    Args:
        tokenizer: that of the model, to compare with.

    Returns:
        The number of ``SAMPLES`` for which aiperf gets other ids.

    Raises:
        RivalError: the vocabulary cannot be written, or the library refuses it.
    """
    try:
        await trio.to_thread.run_sync(write_folder, model, tokenizer, folder)
    except CannotExpress as error:
        raise RivalError(f"aiperf needs a tokenizer, and that of {model.name} cannot be written: {error}") from None
    ours = [tokenizer.encode(text, add_special=False).tolist() for text in SAMPLES]
    done = await trio.run_process(
        [str(generator.python), "-c", _IDS, str(folder / "tokenizer.json")],
        stdin=json.dumps(SAMPLES).encode(),
        check=False,
        capture_stdout=True,
        capture_stderr=True,
    )
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        raise RivalError(f"aiperf's library cannot read the tokenizer of {model.name}: {output[-LOG_TAIL:]}")
    return sum(theirs != expected for theirs, expected in zip(json.loads(done.stdout), ours, strict=True))


# -- loads -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Cell:
    """A closed loop: so many clients, each of which sends its next request when the last one has been answered."""

    endpoint: Endpoint
    prompt: int
    """Tokens of a prompt, or of each turn of a conversation."""
    answer: int
    """Tokens of each answer."""
    concurrency: int
    shared: int = 0
    """Tokens at the beginning of the prompt that all prompts have in common."""
    turns: int = 1
    """Requests of a conversation.  Each has the turns before it in its prompt."""

    def __str__(self) -> str:
        more = [f"shared={self.shared}"] * bool(self.shared) + [f"turns={self.turns}"] * (self.turns > 1)
        return "/".join([self.endpoint, str(self.prompt), str(self.answer), str(self.concurrency), *more])

    @property
    def reuses(self) -> bool:
        """Whether prompts begin as earlier ones do."""
        return self.shared > 0 or self.turns > 1

    @property
    def room(self) -> int:
        """Tokens of context of a sequence, with a quarter more, since a text may get other tokens."""
        return -(-self.turns * (self.prompt + self.answer + MESSAGE_TOKENS) * 5 // 4 // 256) * 256


def parse_cell(text: str) -> Cell:
    """Parse ``ENDPOINT/PROMPT/ANSWER/CONCURRENCY[/shared=TOKENS][/turns=N]``.

    Raises:
        ValueError: the text is no cell; the message has the reason.
    """
    endpoint, *parts = text.split("/")
    if endpoint not in ("completions", "chat"):
        raise ValueError(f"{text!r} does not begin with completions/ or chat/")
    if len(parts) < 3:
        raise ValueError(f"{text!r} is not ENDPOINT/PROMPT/ANSWER/CONCURRENCY, as in completions/800/60/8")
    prompt, answer = (_number(part, 1, MAX_TOKENS, text) for part in parts[:2])
    concurrency = _number(parts[2], 1, MAX_CONCURRENCY, text)
    more = dict(part.partition("=")[::2] for part in parts[3:])
    if more.keys() - {"shared", "turns"}:
        raise ValueError(f"{text!r} has more than shared=TOKENS and turns=N after the concurrency")
    shared = _number(more.get("shared", "0"), 0, prompt - 1, text)
    turns = _number(more.get("turns", "1"), 1, 100, text)
    if turns > 1 and endpoint != "chat":
        raise ValueError(f"{text!r}: only chat has turns")
    return Cell(endpoint=endpoint, prompt=prompt, answer=answer, concurrency=concurrency, shared=shared, turns=turns)


def _number(text: str, low: int, high: int, cell: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    raise ValueError(f"{cell!r}: {text!r} is not a number from {low} to {high}")


def arguments(cell: Cell, requests: int, *, model: str, url: str, tokenizer: Path, out: Path, seed: int) -> list[str]:
    """Arguments of aiperf.  All prompts differ, also those of the warm-up, except for what ``cell`` shares."""
    sessions = -(-requests // cell.turns)
    load = {
        "--isl": cell.prompt - cell.shared,
        "--isl-stddev": 0,
        "--osl": cell.answer,
        "--osl-stddev": 0,
        "--concurrency": cell.concurrency,
        "--num-dataset-entries": sessions + WARM_UP_REQUESTS,
        "--random-seed": seed,
    }
    if cell.turns > 1:
        load |= {
            "--num-sessions": sessions,
            "--session-turns-mean": cell.turns,
            "--session-turns-stddev": 0,
            "--num-warmup-sessions": 1,
        }
    else:
        load |= {"--request-count": requests, "--warmup-request-count": WARM_UP_REQUESTS}
    if cell.shared:
        load |= {"--num-prefix-prompts": 1, "--prefix-prompt-length": cell.shared}
    # Answers have their full length; draft tokens are off, because their gain depends on the text.
    extra = {"ignore_eos": True, "temperature": 0, "speculate": False}
    return [
        "profile", "--model-names", model, "--url", url, "--endpoint-type", cell.endpoint, "--streaming",
        "--tokenizer", str(tokenizer), "--use-server-token-count", "--extra-inputs", json.dumps(extra),
        *(str(part) for pair in load.items() for part in pair),
        "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--export-level", "summary",
        "--artifact-dir", str(out),
    ]  # fmt: skip


async def run_cell(generator: Generator, given: Sequence[str], out: Path) -> Figures:
    """Run aiperf with the arguments ``given``, which write into ``out``, until its load ends.

    Raises:
        RivalError: it failed, or did not end within ``RUN_S``.
    """
    code, output = await _output([str(generator.program), *given], RUN_S, out)
    export = trio.Path(out, EXPORT)
    if await export.exists():
        return read_export(json.loads(await export.read_bytes()))
    failed = re.search(r"All (\d+) inference request", output)
    if failed:  # it writes no export then
        return read_export({"error_request_count": {"avg": int(failed[1])}})
    raise RivalError(f"aiperf ended with exit code {code} and measured nothing: {output[-LOG_TAIL:]}")


# -- what it measured --------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several; ``None`` if aiperf does not report it."""

    wall_s: float | None
    requests_per_s: float | None
    ttft_ms: float | None
    """Mean of all requests; ``_p99`` the 99th percentile.  Likewise the next two."""
    ttft_p99_ms: float | None
    itl_ms: float | None
    """From the first token of a request to its last one, divided by the tokens after the first."""
    itl_p99_ms: float | None
    gap_p99_ms: float | None
    """Over all gaps between two events of a stream."""
    latency_ms: float | None
    latency_p99_ms: float | None
    prompt_tokens: float | None
    """Mean, as the server counts them; likewise the next two."""
    answer_tokens: float | None
    cached_tokens: float | None
    """Prompt tokens that were in the KV cache."""
    errors: float
    """Requests that failed."""


def read_export(export: Mapping[str, Any]) -> Figures:
    """The figures of ``profile_export_aiperf.json``."""

    def value(metric: str, of: str = "avg") -> float | None:
        value_of_metric = (export.get(metric) or {}).get(of)
        return None if value_of_metric is None else float(value_of_metric)

    return Figures(
        wall_s=value("benchmark_duration"),
        requests_per_s=value("request_throughput"),
        ttft_ms=value("time_to_first_token"),
        ttft_p99_ms=value("time_to_first_token", "p99"),
        itl_ms=value("inter_token_latency"),
        itl_p99_ms=value("inter_token_latency", "p99"),
        gap_p99_ms=value("inter_chunk_latency", "p99"),
        latency_ms=value("request_latency"),
        latency_p99_ms=value("request_latency", "p99"),
        prompt_tokens=value("usage_prompt_tokens"),
        answer_tokens=value("usage_completion_tokens"),
        cached_tokens=value("usage_prompt_cache_read_tokens"),
        errors=value("error_request_count") or 0.0,
    )
