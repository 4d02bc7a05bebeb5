"""Checks of the library and the model, most of them of what ``probe`` reports from a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from uma_trio.cli.doctor import probe
from uma_trio.cli.doctor.findings import Finding
from uma_trio.engine_link.devices import MEND_PLUGINS, Devices, size
from uma_trio.models.purpose import IN_WORDS

if TYPE_CHECKING:
    from uma_trio.config import Config

ANSWER: Final = "Paris"
"""Part of the embedded model's answer to ``probe.QUESTION``."""


def check_stamp(settings: Config) -> Iterator[Finding]:
    """Check which library there is, without loading it."""
    from uma_trio.engine_link.installed import LibraryProblem, library_fix, read_stamp

    try:
        stamp = read_stamp(settings.model.llama_dir)
    except LibraryProblem as error:
        yield Finding("stamp", "problem", error.reason, error.remedy or library_fix(settings.model.llama_dir))
    else:
        plugins = f", with plug-ins for {', '.join(stamp.plugins)}" if stamp.plugins else ""
        yield Finding("stamp", "ok", f"{stamp.pin}, built for {stamp.backend}{plugins}, in {stamp.directory}")


def check_library_and_model(settings: Config, flags: dict[str, Any]) -> Iterator[Finding]:
    """Check what ``probe`` reports from a separate process."""
    from uma_trio.engine_link.installed import library_fix
    from uma_trio.engine_link.messages import DOES_NOT_OPEN
    from uma_trio.models.packaged import EMBEDDED, model_path

    path, fix = model_path(settings.model.model), library_fix(settings.model.llama_dir)
    stages, ending = probe.run(flags)
    library, model = stages.get("library"), stages.get("model")
    if library is None:
        if opening := stages.get("opening"):
            yield Finding("library", "problem", f"loading {opening['path']} {ending}", f"{DOES_NOT_OPEN}, or {fix}")
        else:
            yield Finding("library", "problem", f"loading the library {ending}", fix)
        return
    if "problem" in library:
        yield Finding("library", "problem", library["problem"], library["remedy"] or fix)
        return
    yield Finding("library", "ok", f"it loads and supports up to {library['max_sequences']} sequences")
    yield _devices((model or {}).get("devices") or library["devices"], fix)
    if library["plugins"]:
        yield Finding("plug-ins", "ok", f"{', '.join(library['plugins'])}: the best for this machine")
    yield Finding("backend", "ok", library["system_info"].strip() or "the library does not describe it")
    yield from _card(path, EMBEDDED)
    yield from _adapters(settings, path)
    yield _model(path, path == EMBEDDED, model, ending)
    if model is not None and "problem" not in model and model["purpose"] != "generate":
        yield Finding("purpose", "ok", f"it {IN_WORDS[model['purpose']]}; a text has at most {model['n_ctx']:,} tokens")
        yield Finding("fit", "ok", model["fit"] or "off: the settings are taken as they are")
        yield _pooled(stages.get("answer"), ending, fix)
    elif model is not None and "problem" not in model:
        yield _context(model)
        yield Finding("fit", "ok", model["fit"] or "off: the settings are taken as they are")
        yield from _placement(model["devices"])
        yield _memory(model)
        yield _layout(model)
        if model["draft_model"] is not None:
            yield _draft_model(model)
        yield _answer(path == EMBEDDED, stages.get("answer"), ending, fix)


def check_file(settings: Config) -> Iterator[Finding]:
    """Check the file of a further model, without loading it."""
    from uma_trio.engine_link.load_errors import ModelError, explained
    from uma_trio.models.gguf_check import check_gguf
    from uma_trio.models.packaged import model_path

    path = model_path(settings.model.model)
    try:
        with explained(path):
            summary = check_gguf(path)
    except ModelError as error:
        yield Finding("model", "problem", error.reason, error.remedy)
    else:
        yield Finding(
            "model",
            "ok",
            f"{path.name}: {summary.architecture}, {size(summary.size_bytes)}, it {IN_WORDS[summary.purpose]}; not "
            "loaded here",
        )


def _devices(reported: dict[str, Any], fix: str) -> Finding:
    import msgspec

    devices = msgspec.convert(reported, Devices)
    if not devices.found:
        return Finding("devices", "problem", "the library finds no device to compute with", fix)
    remedy = devices.fix or (MEND_PLUGINS if devices.unused_plugins else None)
    return Finding("devices", "ok" if remedy is None else "warning", str(devices), remedy)


def _placement(loaded: dict[str, Any]) -> Iterator[Finding]:
    """What the model takes of each device, if it uses some."""
    import msgspec

    devices = msgspec.convert(loaded, Devices)
    if devices.used and devices.layers_on_gpu:
        yield Finding("placement", "ok", ", ".join(map(str, devices.memory)))


def _card(path: Path, embedded: Path) -> Iterator[Finding]:
    """Compare the embedded model with the checksum in its card."""
    import hashlib
    import re

    if path != embedded:
        return
    if not embedded.is_file():
        yield Finding("embedded", "problem", f"{embedded} is missing", "reinstall uma-trio, or serve another --model")
        return
    own_digest = hashlib.sha256(embedded.read_bytes()).hexdigest()
    cards = [card for card in embedded.parent.iterdir() if card.suffix in (".json", ".md")]
    known = {digest for card in cards for digest in re.findall(r"\b[0-9a-f]{64}\b", card.read_text("utf-8"))}
    if known and own_digest not in known:
        message = f"the checksum of {embedded} differs from the one in its card"
        yield Finding("embedded", "problem", message, "reinstall uma-trio: the file is damaged or was replaced")
    else:
        against = "as in its card" if known else "there is no card to compare it with"
        yield Finding("embedded", "ok", f"{size(embedded.stat().st_size)}, sha256 {own_digest[:12]}, {against}")


def _adapters(settings: Config, path: Path) -> Iterator[Finding]:
    """Check each adapter against the model."""
    from uma_trio.daemon.engines.adapter_check import check_adapters
    from uma_trio.engine_link.load_errors import ModelError
    from uma_trio.models.gguf_header import GgufError

    for adapter in settings.model.adapters:
        try:
            [file] = check_adapters([adapter], path)
        except ModelError as error:
            yield Finding("adapter", "problem", error.reason, error.remedy)
        except (GgufError, OSError):
            return  # the model itself cannot be read, which has a finding of its own
        else:
            yield Finding("adapter", "ok", f"{file.name}: rank {file.rank}, {size(file.size_bytes)}, {file.path}")


def _model(path: Path, embedded: bool, loaded: dict[str, Any] | None, ending: str) -> Finding:
    fix = "reinstall uma-trio, or serve a file of yours with --model" if embedded else "serve another file with --model"
    if loaded is None:
        return Finding("model", "problem", f"loading {path} {ending}", fix)
    if "problem" in loaded:
        return Finding("model", "problem", loaded["problem"], loaded["remedy"] or fix)
    about, millions = loaded["description"], f"{loaded['n_params'] / 1e6:,.1f}"
    if f"{millions}M" not in about:
        about += f", {millions} M parameters"
    return Finding("model", "ok", f"{path.name}: {about}, training context {loaded['n_ctx_train']} tokens")


def _context(reported: dict[str, Any]) -> Finding:
    more = reported["more_context"]
    fix = f"serve with {more}, which gives a request more" if more else None
    return Finding("context", "warning" if reported["context_is_short"] else "ok", reported["context"], fix)


def _memory(loaded: dict[str, Any]) -> Finding:
    """Compare the memory of a process that has loaded the model with what was free before.

    More than that is no problem: the model did load.  A part of it is then swapped, or read from its file again.
    """
    peak, free = loaded["peak_bytes"], loaded["free_bytes"]
    message = (
        f"{size(peak)} for the process with the model and a KV cache of {loaded['n_ctx']:,} tokens; {size(free)} are "
        "free, with swap"
    )
    if peak > 0.8 * free:
        fix = "serve a smaller model, lower --ctx, or set --type-k and --type-v to q8_0"
        return Finding("memory", "warning", f"{message}: answers may be slow", fix)
    return Finding("memory", "ok", message)


LAYOUT_WHY: Final = {
    "only one": "fixed by the settings",
    "rule": "the rule for this device",
    "default": "the default, not measured",
    "measured": "measured now",
    "measured before": "measured by an earlier start",
    "no time": "the default, because measuring takes longer than layout_trial_s",
    "no room": "the default, because the faster layout does not fit into memory",
}


def _layout(loaded: dict[str, Any]) -> Finding:
    """Report the layout of the KV cache, which ``engine/layout.py`` chooses."""
    shown = [f"{name}: {ticks}" for name, ticks in loaded["layouts"].items()]
    why = LAYOUT_WHY[loaded["layout_why"]]
    if loaded["layout_why"] == "measured":
        why += ", for the next starts too" if loaded["layout_is_saved"] else ", but not saved; see cache above"
    ticks = f"; the mean tick counts: {'; '.join(shown)}" if shown else ""
    rule = f"; {loaded['layout_rule']}" if loaded["layout_rule"] else ""
    return Finding("layout", "ok", f"KV cache: {loaded['layout']} ({why}){ticks}{rule}")


def _draft_model(reported: dict[str, Any]) -> Finding:
    """Report what the draft model takes.  A draft model that cannot be used is a problem of the model."""
    message = f"{reported['draft_model']}: {reported['draft_call_ms']:.2f} ms a call, {reported['draft_token_ms']:.3f} ms a token"
    return Finding("draft model", "ok", f"{message} of a prompt; its vocabulary is that of the model")


def _pooled(answer: dict[str, Any] | None, ending: str, fix: str) -> Finding:
    """Report what a model that embeds or ranks made of a text."""
    if answer is None or "problem" in answer:
        problem = f"computing a text {ending}" if answer is None else answer["problem"]
        return Finding("answer", "problem", problem, f"{fix}, or serve another --model")
    return Finding("answer", "ok", f"{answer['text']} for {probe.QUESTION!r} in {answer['ms']:.0f} ms")


def _answer(embedded: bool, answer: dict[str, Any] | None, ending: str, fix: str) -> Finding:
    if answer is None:
        return Finding("answer", "problem", f"asking the model {ending}", fix)
    if "problem" in answer:
        return Finding("answer", "problem", answer["problem"], fix)
    message = f"{answer['text'].strip()!r} in {answer['ms']:.0f} ms"
    if embedded and ANSWER not in answer["text"]:
        wrong = f"the answer to {probe.QUESTION!r} was {message}"
        return Finding("answer", "problem", wrong, f"{fix}: the library computes wrong results")
    return Finding("answer", "ok", message)
