"""The part of ``uma-trio doctor`` that runs C code, in a separate process, because it may hang or crash."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from uma_trio.config import Config

LIMIT_S: Final = 60.0
"""Time limit of the process.  A large model on a slow disk loads slowly; a broken driver never returns."""
TRIAL_S: Final = 20.0
"""Minimum time for measuring layouts of the KV cache.  ``serve`` measures for less, to start sooner."""
QUESTION: Final = "What is the capital of France?"
MIB: Final = 1 << 20


def run(flags: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Run ``probe`` in a child process; return what each stage reported, by name, and how the process ended."""
    import signal
    import subprocess

    given = [text for name, value in flags.items() if value for text in (f"--{name.replace('_', '-')}", value)]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "uma_trio", "doctor", "--probe", *given],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as expired:
        out, ending = expired.stdout or b"", f"did not finish within {LIMIT_S:g} s"
    else:
        out = ended.stdout
        last = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        if ended.returncode < 0:
            ending = f"crashed with {signal.Signals(-ended.returncode).name}"
        else:
            ending = f"ended with exit code {ended.returncode}" + "".join(f": {line}" for line in last)
    stages = {}
    for line in out.splitlines():
        try:
            stage = json.loads(line)
            stages[stage["stage"]] = stage
        except (ValueError, TypeError, KeyError):
            continue  # cut off by the time limit, or printed by something else
    return stages, ending


def probe(settings: Config) -> None:
    """Load the library, load the model and ask it a question; print a line of JSON for each stage reached."""
    from uma_trio.engine.inspect import LibraryProblem, library_directory, load_library

    try:
        library = load_library(library_directory(settings.model.llama_dir))
    except LibraryProblem as error:
        _report("library", problem=str(error))
        return
    _report("library", **attrs.asdict(library))
    _probe_model(settings)


def _probe_model(settings: Config) -> None:
    import resource

    from uma_trio.engine.llama import LOAD_ERRORS, LlamaEngine
    from uma_trio.engine.tuning_cache import FileLayoutCache
    from uma_trio.models.gguf_check import GgufError, check_gguf
    from uma_trio.models.loaded import EMBEDDED

    path = settings.model.model or EMBEDDED
    try:
        check_gguf(path)
        available = available_memory()
        if available is not None and path.stat().st_size > available:
            _report(
                "model",
                problem=f"{path} has {size(path.stat().st_size)}, but only {size(available)} of memory are available",
            )
            return
        trial_s = settings.model.layout_trial_s and max(settings.model.layout_trial_s, TRIAL_S)
        with_time = attrs.evolve(settings.model, layout_trial_s=trial_s)
        engine = LlamaEngine(path, with_time, layout_cache=FileLayoutCache(path))
    except FileNotFoundError:
        _report("model", problem=f"there is no model at {path}")
        return
    except (OSError, GgufError, *LOAD_ERRORS) as error:
        _report("model", problem=f"{path}: {error}")
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    info, choice = engine.info, engine.layout_choice
    _report(
        "model",
        description=info.description,
        n_params=info.n_params,
        n_ctx=info.n_ctx,
        n_ctx_train=info.n_ctx_train,
        peak_bytes=peak,
        layout=choice.layout.name,
        layout_why=choice.why,
        layouts={each.layout.name: str(each) for each in choice.measured},
    )
    _probe_answer(engine)


def _probe_answer(engine: Any) -> None:
    """Generate a few greedy tokens, with the model's chat template if it has one."""
    from uma_trio.engine.messages import SampleRequest, Step, StepInput
    from uma_trio.models.chat import BrokenTemplate, ChatTemplate
    from uma_trio.sampling import SamplingParams
    from uma_trio.sampling.sampler import NO_TOKEN

    prompt = QUESTION
    if engine.chat_template is not None:
        try:
            template = ChatTemplate(engine.chat_template, bos=engine.tokenizer.bos, eos=engine.tokenizer.eos)
            prompt = template.render([{"role": "user", "content": QUESTION}])
        except BrokenTemplate as error:
            _report("answer", problem=f"the model's chat template cannot be used: {error}")
            return
    greedy, tokens, said = SamplingParams(0.0, 0, 1.0, 0), engine.tokenizer.encode(prompt).tolist(), b""
    began, pos, parts = time.perf_counter(), 0, tokens
    for n in range(24):
        for at in range(0, len(parts), engine.info.n_batch):
            part = parts[at : at + engine.info.n_batch]
            last = at + len(part) == len(parts)
            result = engine.step(Step((), [[StepInput(0, pos, part, [SampleRequest(greedy, n)] if last else ())]]))
            pos += len(part)
        (token,) = result.tokens
        if token == NO_TOKEN or token in engine.info.eog_ids:
            break
        said += engine.tokenizer.token_to_bytes(token)
        parts = [token]
    _report("answer", text=said.decode("utf-8", "replace"), ms=1e3 * (time.perf_counter() - began))


def _report(stage: str, **fields: Any) -> None:
    print(json.dumps({"stage": stage, **fields}), flush=True)


def available_memory() -> int | None:
    """Return how many bytes a new process can allocate; ``None`` if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:  # fall back to all physical memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def size(n: int) -> str:
    """Format ``n`` bytes for people."""
    return f"{n / MIB:,.0f} MiB" if n < 10 * 1024 * MIB else f"{n / MIB / 1024:,.1f} GiB"
