"""The part of ``uma-trio doctor`` that runs C code, in a separate process, because it may hang or crash."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

if TYPE_CHECKING:
    from uma_trio.config import Config

LIMIT_S: Final = 60.0
"""Time limit of the process.  A large model on a slow disk loads slowly; a broken driver never returns."""
TRIAL_S: Final = 20.0
"""Minimum time for measuring layouts of the KV cache.  ``serve`` measures for less, to start sooner."""
QUESTION: Final = "What is the capital of France?"


def run(flags: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Run ``probe`` in a child process; return what each stage reported, by name, and how the process ended."""
    import os
    import signal
    import subprocess

    from uma_trio.processes.interpreter import package_environment, python_module

    names = {"file": "--config"}
    given = [
        text
        for name, value in flags.items()
        if value
        for text in (names.get(name, f"--{name.replace('_', '-')}"), value)
    ]
    try:
        ended = subprocess.run(
            [*python_module("uma_trio"), "doctor", "--probe", *given],
            env={**os.environ, **package_environment()},
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
    from uma_trio.engine.inspect import load_library
    from uma_trio.engine_link.installed import LibraryProblem

    try:
        library = load_library(settings.model.llama_dir, lambda path: _report("opening", path=str(path)))
    except LibraryProblem as error:
        _report("library", problem=error.reason, remedy=error.remedy)
        return
    _report(
        "library",
        system_info=library.system_info,
        max_sequences=library.max_sequences,
        plugins=library.plugins,
        devices=msgspec.to_builtins(library.devices),
    )
    _probe_model(settings)


def _probe_model(settings: Config) -> None:
    from uma_trio.daemon.prompts.context import explain_context, is_short, more_context
    from uma_trio.engine.llama import LlamaEngine
    from uma_trio.engine.open_fitted import open_engine
    from uma_trio.engine_link.load_errors import ModelError, explained
    from uma_trio.engine_link.messages import Start
    from uma_trio.models.gguf_check import check_gguf
    from uma_trio.models.packaged import model_path
    from uma_trio.processes.machine import free_memory_bytes

    path, free = model_path(settings.model.model), free_memory_bytes()
    draft = None if settings.model.draft_model is None else Path(settings.model.draft_model)
    trial_s = settings.model.layout_trial_s and max(settings.model.layout_trial_s, TRIAL_S)
    try:
        with explained(draft or path):
            draft_sizes = None if draft is None else check_gguf(draft).sizes
        with explained(path):
            summary = check_gguf(path)
            start = Start(
                path,
                attrs.evolve(settings.model, layout_trial_s=trial_s),
                sizes=summary.sizes,
                draft_sizes=draft_sizes,
                min_batch=settings.min_batch,
                purpose=summary.purpose,
                target_itl_ms=settings.scheduling.target_itl_ms,
            )
            engine = open_engine(start, lambda share: True)
    except ModelError as error:
        _report("model", problem=error.reason, remedy=error.remedy)
        return
    if not isinstance(engine, LlamaEngine):
        _probe_pooling(engine, path, free)
        return
    info, choice = engine.info, engine.layout_choice
    _report(
        "model",
        **_facts(engine, free),
        layout=choice.layout.name,
        draft_model=info.draft_model,
        draft_call_ms=info.draft_call_ms,
        draft_token_ms=info.draft_token_ms,
        layout_why=choice.why,
        layout_is_saved=choice.is_saved,
        layout_rule=choice.rule,
        layouts={trial.layout.name: str(trial) for trial in choice.measured},
        context=explain_context(info),
        context_is_short=is_short(info, settings.limits),
        more_context=more_context(info),
    )
    _probe_answer(engine)


def _facts(engine: Any, free: int) -> dict[str, Any]:
    """What is known of any model.

    Args:
        free: bytes of memory that were free before it was loaded.
    """
    import resource

    info, peak = engine.info, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "purpose": info.purpose,
        "description": info.description,
        "n_params": info.n_params,
        "n_ctx": info.n_ctx,
        "n_ctx_train": info.n_ctx_train,
        "peak_bytes": peak * (1 if sys.platform == "darwin" else 1024),
        "free_bytes": free,
        "fit": None if engine.fit is None else f"{engine.fit.choice}; {engine.fit.why}",
        "devices": msgspec.to_builtins(engine.devices()),
    }


def _probe_pooling(engine: Any, path: Path, free: int) -> None:
    """Let a model that embeds or ranks compute a text."""
    import numpy as np

    from uma_trio.engine_link.messages import EmbeddingInput, Step
    from uma_trio.tokenizer.tokenizer import open_vocabulary

    _report("model", **_facts(engine, free))
    with open_vocabulary(path) as vocabulary:
        tokens = vocabulary.tokenizer.encode(QUESTION).tolist()
    began = time.perf_counter()
    result = engine.step(Step(embeddings=[EmbeddingInput(0, 0, tokens, len(tokens))]))
    ms = 1e3 * (time.perf_counter() - began)
    if result.embedding_failure is not None:
        _report("answer", problem=result.embedding_failure)
        return
    if not np.isfinite(result.embeddings[0]).all():
        _report("answer", problem="it computes no finite numbers")
        return
    of_text = "a score" if engine.info.purpose == "rank" else f"{len(result.embeddings[0])} numbers"
    _report("answer", text=of_text, ms=ms)


def _probe_answer(engine: Any) -> None:
    """Generate a few greedy tokens, with the model's chat template if it has one."""
    from uma_trio.daemon.prompts.chat import BrokenTemplate, ChatTemplate
    from uma_trio.engine_link.messages import SampleRequest, Step, StepInput
    from uma_trio.engine_link.sampling import NO_TOKEN, SamplingParams

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
