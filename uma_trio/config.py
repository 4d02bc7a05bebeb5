"""What an operator can set, once: names, units, defaults, bounds and reasons.

Every setting is a field of one of the frozen classes below.  The YAML file, the ``UMA_*``
environment, the flags of ``uma-trio serve`` and the table in docs/CONFIG.md are made *from* the
fields, so they cannot drift apart.  Names are unique over all sections: a flag or a variable needs no
section (``--max-connections``, ``UMA_MAX_CONNECTIONS``), while the file groups them::

    limits:
      max_connections: 64

Later beats earlier: defaults, file, environment, flags.  An unknown key is an error that names the
nearest known one.
"""
# ruff: noqa: RUF009  (``setting`` makes a field, not a value)

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

KIB: Final = 1024
MIB: Final = 1024 * KIB


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type, or out of bounds; says where it was set."""


def setting(
    default: Any, help: str, *, ge: float | None = None, le: float | None = None, gt: float | None = None
) -> Any:
    """A field with its reason and its bounds."""
    return attrs.field(default=default, metadata={"help": help, "ge": ge, "le": le, "gt": gt})


@attrs.frozen(kw_only=True)
class Model:
    """Which model is served, and with what memory and compute."""

    model: Path | None = setting(None, "GGUF file to serve; the embedded demo model if not given.")
    ctx: int = setting(
        0,
        "KV cache in tokens, for all sequences together; 0 makes room for 8192 each, or as many as the "
        "model was trained for, within a quarter of the machine's memory.",
        ge=0,
        le=64 * MIB,
    )
    parallel: int = setting(8, "Sequences decoded at once; further requests wait in the queue.", ge=1, le=256)
    threads: int = setting(
        0, "Compute threads of a decode; 0 takes all physical cores but one, which the event loop needs.", ge=0, le=512
    )
    batch_tokens: int = setting(
        512, "Most tokens of one llama_decode (n_batch, n_ubatch): what one tick can take.", ge=32, le=8192
    )
    gpu_layers: int = setting(-1, "Layers kept on the GPU, where the library has one; -1 takes all.", ge=-1, le=10_000)
    kv_mem_limit_mb: int = setting(
        0, "Most megabytes of KV cache: ctx is lowered to what fits. 0: as many as ctx takes.", ge=0, le=100_000_000
    )
    kv_unified: Literal["auto", "on", "off"] = setting(
        "auto",
        "on: all sequences share ctx, and one can use all of it; off: each has ctx / parallel tokens of its "
        "own. auto: whichever is measured to be quicker here, with flash_attn; else on with a GPU, off without.",
    )
    flash_attn: Literal["auto", "on", "off"] = setting(
        "auto",
        "Flash attention. auto: as is measured to be quicker, with kv_unified; else off on a CPU, where it is "
        "slow for small batches, and llama.cpp's choice elsewhere.",
    )
    layout_trial_s: float = setting(
        1.5,
        "Most seconds that a first start takes to measure what auto is best, or a tenth of what loading took; later "
        "ones remember it. 0: nothing is measured, for a start that is always the same.",
        ge=0,
        le=3600,
    )
    type_k: Literal["f16", "q8_0", "q4_0"] = setting("f16", "Type of the K cache.")
    type_v: Literal["f16", "q8_0", "q4_0"] = setting("f16", "Type of the V cache.")
    mmap: bool = setting(True, "Map the model file instead of reading it into memory.")
    llama_dir: Path | None = setting(
        None, "Folder of the built libllama; the one that build_llama.sh filled if not given."
    )


@attrs.frozen(kw_only=True)
class Listen:
    """Where clients come in."""

    socket: Path | None = setting(
        None, "Unix socket. Default: $XDG_RUNTIME_DIR/uma-trio/uma.sock, or /tmp/uma.sock without $XDG_RUNTIME_DIR."
    )
    protocol: Literal["auto", "json", "cbor", "newline"] = setting(
        "auto", "auto tells JSON from CBOR by a payload's first byte; newline is for nc -U."
    )
    backlog: int = setting(128, "Connections that may wait to be accepted.", ge=1, le=65535)


@attrs.frozen(kw_only=True)
class Limits:
    """What clients may ask for.  Beyond it is an E_LIMIT_* error, never a silent cut."""

    max_connections: int = setting(256, "Connections at a time.", ge=1, le=100_000)
    max_queue: int = setting(256, "Requests that may wait for a sequence.", ge=0, le=1_000_000)
    max_frame_bytes: int = setting(
        MIB, "Payload of one frame; checked before its memory is taken.", ge=256, le=64 * MIB
    )
    max_prompt_bytes: int = setting(256 * KIB, "UTF-8 bytes of a prompt, before tokenizing.", ge=1, le=64 * MIB)
    max_prompt_tokens: int = setting(1 << 20, "Tokens of a prompt.", ge=1, le=64 * MIB)
    max_tokens: int = setting(4096, "Most that a request may ask for as max_tokens.", ge=1, le=2**31 - 1)
    default_max_tokens: int = setting(
        512, "max_tokens of a request that names none, or what the context has room for.", ge=1, le=2**31 - 1
    )
    max_tx_bytes: int = setting(
        256 * KIB,
        "Bytes waiting for one client that does not read; its stream pauses at that, the others go on.",
        ge=4 * KIB,
        le=1024 * MIB,
    )
    idle_timeout_s: float = setting(300.0, "Without a byte from the client and with no request running.", gt=0, le=1e6)
    frame_timeout_s: float = setting(30.0, "From the first byte of a frame to its last.", gt=0, le=1e6)
    request_timeout_s: float = setting(3600.0, "From a request's arrival to its end, waiting included.", gt=0, le=1e7)
    write_timeout_s: float = setting(
        60.0, "A client that takes not a byte for this long while some wait is given up.", gt=0, le=1e6
    )
    drain_timeout_s: float = setting(
        30.0, "For running requests to end after SIGTERM; then they are cancelled.", ge=0, le=1e6
    )


@attrs.frozen(kw_only=True)
class Scheduling:
    """How ticks are filled.  Nothing here changes while serving."""

    target_tbt_ms: float = setting(
        100.0,
        "Most milliseconds between a stream's tokens while prompts are read, if its request names no "
        "slo.target_tbt_ms: what decoding leaves of them goes to prompts.",
        gt=0,
        le=600_000,
    )
    background_tbt_ms: float = setting(
        1000.0, "The same for requests with slo.priority background, in milliseconds.", gt=0, le=600_000
    )
    target_ttft_ms: float = setting(
        2000.0,
        "Milliseconds until the first token of a request that names no slo.target_ttft_ms: of prompts of one "
        "class and user the one whose time is up first is read first.",
        gt=0,
        le=3_600_000,
    )
    prefill_tick_ms: float = setting(
        250.0,
        "Longest tick in milliseconds while prompts are read and no stream waits: so long may a new "
        "request or a cancelled one have to wait for its turn.",
        gt=0,
        le=600_000,
    )
    min_chunk_tokens: int = setting(
        16,
        "Smallest chunk of a prompt that is worth a tick, in tokens. Where a stream's time has no room for "
        "it, every other tick has such a chunk and makes the stream late: prompts may not wait for ever.",
        ge=1,
        le=8192,
    )
    prefill_burst_tokens: int = setting(
        64,
        "Prompt tokens of one user before the next one's turn (kBurst). A prompt with no more of them left goes "
        "before longer ones.",
        ge=1,
        le=8192,
    )
    prefix_reuse: bool = setting(
        True,
        "Keep what ended requests have computed while there is room, and share it, and what running ones have "
        "computed, with requests of the same user that begin alike.",
    )
    speculation: bool = setting(
        True,
        "Check guesses at the next tokens (prompt lookup) where that is predicted to be faster. The text is that of "
        "plain decoding; a request's own speculate goes before.",
    )


@attrs.frozen(kw_only=True)
class Sessions:
    """Conversations that the server remembers, by their ``session_id``."""

    state_dir: Path | None = setting(
        None, "Folder for what outlives the daemon; $XDG_STATE_HOME/uma-trio if not given."
    )
    max_stored_sessions: int = setting(
        10_000, "Most sessions of a model; beyond it the one not used for longest is closed.", ge=1, le=1_000_000
    )
    session_ttl_s: float = setting(
        30 * 86_400.0, "A session that is not used for so long is closed; in seconds.", gt=0, le=1e9
    )
    spill: bool = setting(
        True,
        "Write the KV cache of sessions to disk before it has to go, and read it again where that is faster than "
        "computing it. Without it their tokens alone are kept.",
    )
    spill_max_mb: int = setting(
        4096, "Most megabytes of KV caches on disk; beyond it those not used for longest go.", ge=1, le=100_000_000
    )
    spill_after_s: float = setting(
        30.0,
        "A session that is idle for so long is written to disk although its room is not needed, so that it survives a "
        "crash; in seconds.",
        ge=0,
        le=1e9,
    )


@attrs.frozen(kw_only=True)
class Operations:
    """What the people who run it see."""

    log_format: Literal["auto", "human", "json"] = setting(
        "auto", "auto writes for people on a terminal and JSON lines otherwise."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least level that is logged.")
    debug: bool = setting(False, "One log line a tick; costs throughput.")
    snapshot_dir: Path | None = setting(
        None, "Folder for the metrics snapshots that SIGUSR1 writes; the socket's folder if not given."
    )
    perf_log: Path | None = setting(
        None, "File to which a record of each tick and each request is added; uma-trio perf report reads it."
    )
    perf_log_mb: int = setting(
        256,
        "Most megabytes of perf log on disk. At half of them the file is moved to the same name with .1, over "
        "the one there, and begun anew.",
        ge=1,
        le=1_000_000,
    )


@attrs.frozen(kw_only=True)
class Config:
    """All settings, by section."""

    model: Model = attrs.field(factory=Model)
    listen: Listen = attrs.field(factory=Listen)
    limits: Limits = attrs.field(factory=Limits)
    scheduling: Scheduling = attrs.field(factory=Scheduling)
    sessions: Sessions = attrs.field(factory=Sessions)
    operations: Operations = attrs.field(factory=Operations)


SECTIONS: Final[Mapping[str, type]] = {
    "model": Model,
    "listen": Listen,
    "limits": Limits,
    "scheduling": Scheduling,
    "sessions": Sessions,
    "operations": Operations,
}


@attrs.frozen
class Setting:
    """One field, as the file, the environment, the flags and the documents see it."""

    section: str
    name: str
    type: Any
    default: Any
    help: str
    bounds: tuple[float | None, float | None, float | None]
    """(at least, at most, more than)"""

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it can be, if it is a choice."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def variable(self) -> str:
        return f"UMA_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def read(self, value: Any, where: str) -> Any:
        """``value`` as this setting's type and within its bounds.

        Text is understood as the environment spells it; ``null`` and the empty text are "not given"
        where that is allowed.

        Raises:
            ConfigError: naming ``where`` it came from.
        """
        try:
            found = self._convert(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: ~nobody
            raise ConfigError(f"{where}: {self.name} must be {self.expected}, not {value!r}") from None
        ge, le, gt = self.bounds
        if found is not None and not (
            (ge is None or found >= ge) and (le is None or found <= le) and (gt is None or found > gt)
        ):
            raise ConfigError(f"{where}: {self.name} must be {self.expected}, not {value!r}")
        return found

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(self.type, "a path")
        ge, le, gt = self.bounds
        if le is None:
            return kind
        lower = f"from {ge:.10g}" if ge is not None else f"above {gt:g}, up"
        return f"{kind} {lower} to {le:.10g}"

    def _convert(self, value: Any) -> Any:
        if self.choices:
            if value not in self.choices:
                raise ValueError
            return value
        if isinstance(self.type, types.UnionType):  # Path | None
            if value is None or value == "":
                return None
            if not isinstance(value, str | Path) or "\0" in str(value):
                raise TypeError
            return Path(value).expanduser()
        if self.type is bool:
            if isinstance(value, str):
                return {"1": True, "true": True, "yes": True, "on": True}.get(value.lower()) or _false(value)
            if not isinstance(value, bool):
                raise TypeError
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError
        if self.type is int and isinstance(value, float):
            raise TypeError
        return self.type(value)


def _false(value: str) -> bool:
    if value.lower() not in ("0", "false", "no", "off", ""):
        raise ValueError
    return False


def settings() -> Iterator[Setting]:
    """All settings in the order of this file."""
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in attrs.fields(cls):
            meta = field.metadata
            bounds = (meta["ge"], meta["le"], meta["gt"])
            yield Setting(section, field.name, hints[field.name], field.default, meta["help"], bounds)


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Defaults, then ``file``, then ``UMA_*`` of ``environment``, then ``flags`` that are not ``None``.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of bounds, values that cannot go
            together, or an unreadable file.
    """
    known = {found.name: found for found in settings()}
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file, known))
    values.update(_from_environment(environment or {}, known))
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = known[name].read(value, known[name].flag)
    config = _build(values, known)
    _check_together(config)
    return config


def _build(values: Mapping[str, Any], known: Mapping[str, Setting]) -> Config:
    sections = {
        section: cls(**{name: value for name, value in values.items() if known[name].section == section})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections)


def _check_together(config: Config) -> None:
    """What no setting can tell alone.  The policy's promises rest on the first of these."""
    model, scheduling = config.model, config.scheduling
    for name, tokens in (("batch_tokens", model.batch_tokens), ("ctx", model.ctx)):
        needed = model.parallel + scheduling.prefill_burst_tokens
        if 0 < tokens < needed:
            raise ConfigError(
                f"{name} is {tokens}, but a tick must hold a token of each of {model.parallel} sequences "
                f"(parallel) and {scheduling.prefill_burst_tokens} of a prompt (prefill_burst_tokens): "
                f"make {name} at least {needed}, or one of the others smaller"
            )
    if scheduling.min_chunk_tokens > model.batch_tokens - model.parallel:
        raise ConfigError(
            f"min_chunk_tokens is {scheduling.min_chunk_tokens}, more than the {model.batch_tokens} of "
            f"batch_tokens less {model.parallel} of parallel that a tick has for prompts: make it smaller, "
            "or batch_tokens larger"
        )


def _from_file(file: Path, known: Mapping[str, Setting]) -> Iterator[tuple[str, Any]]:
    import yaml  # not needed by those who have no file

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter of a number or a date that is none
        raise ConfigError(f"{file} is not YAML: {error}") from None
    for section, fields in _mapping(found, str(file)).items():
        if section not in SECTIONS:
            raise _unknown(section, SECTIONS, str(file), "section")
        for name, value in _mapping(fields, f"{file}: {section}").items():
            here = {name for name, setting in known.items() if setting.section == section}
            if name not in here:
                raise _unknown(name, here, f"{file}: {section}", "key")
            yield name, known[name].read(value, f"{file}: {section}")


def _mapping(found: Any, where: str) -> dict[Any, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected keys and values, not {type(found).__name__}")
    return found


def _from_environment(environment: Mapping[str, str], known: Mapping[str, Setting]) -> Iterator[tuple[str, Any]]:
    by_variable = {setting.variable: setting for setting in known.values()}
    for variable, value in environment.items():
        if not variable.startswith("UMA_") or variable.startswith("UMA_TEST_"):
            continue
        if variable not in by_variable:
            raise _unknown(variable, by_variable, "the environment", "variable")
        yield by_variable[variable].name, by_variable[variable].read(value, variable)


def _unknown(name: object, known: Mapping[str, Any] | set[str], where: str, kind: str) -> ConfigError:
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(sorted(known))}"
    return ConfigError(f"{where}: unknown {kind} {name!s}{hint}")


def to_yaml(config: Config) -> str:
    """``config`` as a file that ``load`` reads back to the same; each setting with its reason."""
    import textwrap

    lines: list[str] = []
    section = ""
    for found in settings():
        if found.section != section:
            section = found.section
            lines += ["", f"{section}:"] if lines else [f"{section}:"]
        value = getattr(getattr(config, section), found.name)
        plain = str(value) if isinstance(value, Path) else value
        lines += textwrap.wrap(found.help, 96, initial_indent="  # ", subsequent_indent="  # ")
        lines.append(f"  {found.name}: {_yaml_scalar(plain)}")
    return "\n".join(lines) + "\n"


def _yaml_scalar(value: str | int | float | bool | None) -> str:
    import json

    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isascii() and c.isprintable() else f"\\U{ord(c):08X}" for c in text)
