"""The table of request fields: sampling parameters, and all others with a plain value: numbers, switches, lists of texts.

A row has name, type, bounds, default, the names in other APIs, and a sentence.  Everything else follows from it:

- the field of a request (``Generate``) and its bounds;
- the flags of ``ask`` and ``chat``, the form of the dashboard, the attributes of traces, the tables of the documents;
- the fields of the HTTP APIs, their names in errors and in the OpenAPI document, the options of Ollama's API;
- of a sampling parameter also the setting (``config.Sampling``), its flag of ``serve``, the field of the engine
  (``SamplingParams``), and what llama-server's API reports.

``engine/sampling/sampler.py`` says what a parameter does.  This module is imported by every command, so it imports little.
"""
# ruff: noqa: RUF009  (``field`` makes a field, not a value)

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import attrs

T = TypeVar("T", bound=type)

MAX_INT32: Final = 2**31 - 1
"""llama.cpp counts and numbers tokens with 32-bit signed integers."""

MAX_SEED: Final = 2**63 - 1
"""Largest signed 64-bit integer, which every client's language can hold."""

DEFAULT_BREAKERS: Final = ["\n", ":", '"', "*"]
"""As in llama.cpp."""


@attrs.frozen(kw_only=True)
class Field:
    """One row of the table."""

    name: str = ""
    """In requests, settings and the engine."""
    kinds: tuple[Any, ...] = ()
    """Its types: one, or that of a value and that of a list of them."""
    default: Any
    """Without a request, a setting and a model file that say otherwise."""
    help: str
    """What it does.  Links are relative to docs/PROTOCOL-REFERENCE.md."""
    unset: str | None = None
    """What holds if the default is ``None``, and the request does not give the field."""
    bounds: Mapping[str, Any]
    """What a value, or each value of a list, may be: as ``msgspec.Meta`` takes it."""
    most: int | None = None
    """Length of a list."""
    flags: tuple[str, ...] = ()
    """Spellings of its flag.  A number that has one is in the form of the dashboard, too."""
    api_names: Mapping[str, tuple[str, ...]] = attrs.Factory(dict)
    """Its names in each HTTP API that has it; of a sampling parameter where they differ from ``name``, as all APIs have all
    parameters.  Of several names in a body the first one counts.

    ``openai`` stands also for requests of llama-server's API, ``llama-server`` for what that API reports, ``responses`` for
    OpenAI's Responses, ``ollama`` for the options of Ollama's API.
    """
    minus_one: float | None = -1
    """What -1 stands for in other APIs and in model files; ``None``: that there is no value."""
    trace: str | None = None
    """Its name in OpenTelemetry's conventions, if they have one."""
    goes_with_controller: bool = True
    """Whether a request with a controller may have it."""

    @property
    def type(self) -> Any:
        """The type of a value, or of each value of a list."""
        return typing.get_args(self.kinds[-1])[0] if self.is_list else self.kinds[-1]

    @property
    def is_list(self) -> bool:
        """Whether it may have several values."""
        return typing.get_origin(self.kinds[-1]) is list

    @property
    def plain_help(self) -> str:
        """``help`` without Markdown, and with what holds without a value."""
        text = self.help if self.unset is None else f"{self.help}  [default: {self.unset}]"
        return re.sub(r"\[([^][]+)\]\([^)]+\)", r"\1", text).replace("`", "")

    def names_in(self, dialect: str) -> tuple[str, ...]:
        """Its names in a dialect; empty if the dialect has no such field, or one with a meaning of its own."""
        return self.api_names.get(dialect, ())

    def from_client(self, value: Any) -> Any:
        """A value of another API as the socket protocol has it."""
        return self.minus_one if value == -1 else value


@attrs.frozen(kw_only=True)
class Parameter(Field):
    """The row of a sampling parameter."""

    short: str | None = None
    """A second spelling of the flag, that of llama.cpp's tools."""
    gguf: str | None = None
    """Key with which a model file recommends a value.  Source: llama.h, ``LLAMA_MODEL_META_KEY_SAMPLING_*``."""

    def names_in(self, dialect: str) -> tuple[str, ...]:
        return self.api_names.get(dialect, (self.name,))


def field(default: Any, help: str, *, row: Callable[..., Field] = Field, **rest: Any) -> Any:
    """Declare a field.

    Args:
        rest: fields of the row, and its bounds: ``between``, or ``above`` without the lower one; of a text its ``chars``.
    """
    bounds = {"multiple_of": rest.pop("multiple_of")} if "multiple_of" in rest else {}
    for name, ends in (("between", ("ge", "le")), ("above", ("gt", "le")), ("chars", ("min_length", "max_length"))):
        bounds |= zip(ends, rest.pop(name, ()), strict=False)
    return attrs.field(default=default, metadata={"row": row(default=default, help=help, bounds=bounds, **rest)})


def in_steps(ge: float, le: float, multiple_of: float) -> str:
    """The values that a field with these bounds may have: ``0 or 2``."""
    return " or ".join(map(str, range(int(ge), int(le) + 1, int(multiple_of))))


def parameter(default: float, help: str, **rest: Any) -> Any:
    """Declare a sampling parameter, as ``field`` does."""
    return field(default, help, row=Parameter, **rest)


@attrs.frozen(kw_only=True)
class PlainFields:
    """The fields of a request that have a plain value and are no sampling parameters."""

    max_tokens: int | None = field(
        None,
        "Maximum number of tokens to generate.",
        unset="[as many as there is room for](PROTOCOL.md#answers-of-open-length), or the daemon's `default_max_tokens`",
        between=(1, MAX_INT32),
        flags=("--max-tokens",),
        api_names={
            "openai": ("max_completion_tokens", "max_tokens", "n_predict"),
            "responses": ("max_output_tokens",),
            "ollama": ("num_predict",),
        },
        minus_one=None,
        trace="max_tokens",
    )
    fit_max_tokens: bool = field(
        False,
        "Take a `max_tokens` for which there is no room as absent, instead of refusing the request. For clients that "
        "always send a large number.",
    )
    n: int = field(
        1,
        "Number of answers; see [several answers](PROTOCOL.md#several-answers).",
        between=(1, 16),
        api_names={"openai": ("n_cmpl", "n")},
        trace="choice.count",
        goes_with_controller=False,
    )
    seed: int | None = field(
        None,
        "The same request with the same seed gives the same text.",
        unset="the daemon chooses a seed and reports it in `eos`",
        between=(0, MAX_SEED),
        flags=("--seed",),
        api_names={"openai": ("seed",), "ollama": ("seed",)},
        minus_one=None,
        trace="seed",
    )
    stop: str | list[str] = field(
        attrs.Factory(list),
        "Strings that end the answer. They are not part of it.",
        chars=(1, 256),
        most=16,
        flags=("--stop",),
        api_names={"openai": ("stop",), "anthropic": ("stop_sequences",), "ollama": ("stop",)},
        trace="stop_sequences",
        goes_with_controller=False,
    )
    stop_token_ids: list[int] = field(
        attrs.Factory(list),
        "Tokens that end the answer with reason `stop`, like the model's own end-of-generation tokens. They add no text.",
        between=(0, MAX_INT32),
        most=64,
        flags=("--stop-token",),
        api_names={"openai": ("stop_token_ids",)},
        goes_with_controller=False,
    )
    ignore_eos: bool = field(
        False,
        "Never sample an end-of-generation token: generate exactly `max_tokens`, unless a stop string ends the answer.",
        api_names={"openai": ("ignore_eos",)},
        goes_with_controller=False,
    )
    n_keep: int | None = field(
        None,
        "If prompt and answer exceed the context, drop the oldest tokens after the first `n_keep`, or "
        "[whole messages](PROTOCOL.md#conversations) of a session's chat.",
        unset="refuse with `E_LIMIT_CONTEXT`",
        between=(0, MAX_INT32),
        flags=("--n-keep",),
        api_names={"ollama": ("num_keep",)},
        minus_one=None,
        goes_with_controller=False,
    )
    separate_reasoning: bool = field(
        False,
        "Send the model's reasoning in [events of its own](#reasoning), without its markers. Otherwise both are part of "
        "the text.",
        goes_with_controller=False,
    )
    reasoning_budget: int | None = field(
        None,
        "Tokens of [reasoning](#reasoning) after which its end is forced; with 0 there is none.",
        unset="no limit but `max_tokens`",
        between=(0, MAX_INT32),
        flags=("--reasoning-budget",),
        api_names={"openai": ("reasoning_budget_tokens", "thinking_budget_tokens")},
        minus_one=None,
        goes_with_controller=False,
    )
    logprobs: int | None = field(
        None,
        "Report the log probability of each token, and of this many most likely alternatives: see [token](#token).",
        between=(0, 20),
    )
    dry_sequence_breakers: list[str] = field(
        attrs.Factory(DEFAULT_BREAKERS.copy),
        "Texts that end a repetition, for `dry_multiplier`.",
        chars=(1, 40),
        most=16,
        api_names={"openai": ("dry_sequence_breakers",)},
    )
    cache_prompt: bool = field(
        True,
        "Reuse the KV cache of earlier requests of the same principal that begin alike, and leave this one's to later "
        "ones; see [prefix reuse](PROTOCOL.md#prefix-reuse).",
        api_names={"openai": ("cache_prompt",)},
    )
    speculate: bool | None = field(
        None,
        "Use speculative decoding (prompt lookup, and the draft model if there is one) when it is predicted to be faster. "
        "`true` also tries it before any draft token was accepted, for answers that repeat their prompt. The text is the "
        "same.",
        unset="the daemon's `speculation`",
        api_names={"openai": ("speculate",)},
    )
    stream: bool = field(True, "`false`: no `token` events; `eos` has the whole text.")
    echo: bool = field(
        False, "Send the prompt's text first (for `messages`, the rendered chat).", goes_with_controller=False
    )
    return_full_text: bool = field(
        False, "Alias of `echo`: with `stream: false`, the text begins with the prompt's.", goes_with_controller=False
    )
    progress: bool = field(False, "Send [progress](#progress) events during prefill.")
    forecast: bool = field(False, "Send [forecast](#forecast) events until it starts.")
    explain: bool = field(
        False,
        "Say in `usage` which tokens of the prompt were computed although an earlier one began alike, and why: see "
        "[explanation](#explanation).",
        api_names={"openai": ("explain",)},
        goes_with_controller=False,
    )
    deadline_ms: int | None = field(
        None,
        "Milliseconds from its arrival in which the answer is to be complete. If the [forecast](#forecast) says that it "
        "will not be, the request is refused at once with `E_LIMIT_DEADLINE`; the same if the answer has not begun by then.",
        unset="none but the daemon's `request_timeout_s`",
        between=(1, MAX_INT32),
        flags=("--deadline-ms",),
        api_names={"openai": ("deadline_ms",), "responses": ("deadline_ms",)},
        minus_one=None,
        goes_with_controller=False,
    )
    detached: bool = field(
        False,
        "The daemon answers on its own, and the connection gets no events of it; see "
        "[detached answers](PROTOCOL.md#detached-answers).",
        goes_with_controller=False,
    )
    admit_now: bool = field(
        False,
        "With `detached`: end the answer with the error, such as `E_LIMIT_QUEUE`, if it cannot be begun at once. Otherwise "
        "the daemon tries again. A client is expected to read: the answer is cancelled `unattended_s` after the last one left.",
        goes_with_controller=False,
    )
    client_state: str | None = field(
        None,
        "With `detached`: a text that the description of the answer has again. The daemon does not read it.",
        chars=(1, 1 << 20),
        goes_with_controller=False,
    )
    keep_alive: bool = field(False, "Keep the connection open for further requests.")
    parse_special: bool = field(
        True,
        "`false`: control tokens that `prompt` spells out stay text, except user-defined ones. In `messages` they always "
        "stay text.",
    )
    parallel_tool_calls: bool = field(True, "`false`: the answer ends after its first call.")
    history: Literal["continue", "replace"] = field(
        "continue",
        "`replace`: the request has the whole conversation of its [session](PROTOCOL.md#conversations), and replaces what the "
        "session has.",
    )
    drop_messages: int = field(
        0,
        "How many of the [session](PROTOCOL.md#conversations)'s last messages this request replaces. With 2, the last question and "
        "its answer make room for the request's messages: ask again, or ask something else. If the request fails, the "
        "session keeps them.",
        between=(0, MAX_INT32),
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whether it was sent as one string or as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@attrs.frozen
class SamplingValues:
    """A value for each parameter."""

    temperature: float = parameter(
        0.0,
        "Divides the logits. 0 always takes the most likely token, so that the filters have no effect.",
        between=(0, 100),
        short="--temp",
        gguf="general.sampling.temp",
        trace="temperature",
    )
    top_k: int = parameter(
        0,
        "Sample from this many most likely tokens. 0 is off.",
        between=(0, MAX_INT32),
        minus_one=0,
        gguf="general.sampling.top_k",
        trace="top_k",
    )
    top_p: float = parameter(
        1.0,
        "Sample from the smallest set of most likely tokens that together have this probability. 1 is off.",
        above=(0, 1),
        gguf="general.sampling.top_p",
        trace="top_p",
    )
    min_p: float = parameter(
        0.0,
        "Sample from tokens with at least this fraction of the most likely token's probability. 0 is off.",
        between=(0, 1),
        gguf="general.sampling.min_p",
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divides positive logits, and multiplies negative ones, of the last repeat_last_n tokens. 1 is off.",
        between=(0.1, 10),
        short="--repeat-penalty",
        api_names={
            **dict.fromkeys(("openai", "responses", "anthropic"), ("repetition_penalty", "repeat_penalty")),
            **dict.fromkeys(("llama-server", "ollama"), ("repeat_penalty",)),
        },
        gguf="general.sampling.penalty_repeat",
    )
    repeat_last_n: int = parameter(
        64,
        "Window of repetition_penalty, in tokens of prompt and answer together. 0 is off.",
        between=(0, 4096),
        minus_one=4096,
        gguf="general.sampling.penalty_last_n",
    )
    frequency_penalty: float = parameter(
        0.0,
        "Subtracted from a token's logit for each time that the answer contains it. 0 is off.",
        between=(-2, 2),
        trace="frequency_penalty",
    )
    presence_penalty: float = parameter(
        0.0,
        "Subtracted once from the logit of each token that the answer contains. 0 is off.",
        between=(-2, 2),
        trace="presence_penalty",
    )
    top_n_sigma: float = parameter(
        0.0,
        "Sample from tokens whose logit is at most this many standard deviations of all logits below the largest one. "
        "0 is off.",
        between=(0, 100),
        minus_one=0,
    )
    typical_p: float = parameter(
        1.0,
        "Sample from the tokens whose surprise is nearest to the expected one, and that together have this probability. "
        "1 is off.",
        above=(0, 1),
    )
    xtc_probability: float = parameter(
        0.0,
        "Chance for each token that its most likely choices are excluded: all that have xtc_threshold, except the least "
        "likely one of them. 0 is off.",
        between=(0, 1),
        gguf="general.sampling.xtc_probability",
    )
    xtc_threshold: float = parameter(
        0.1,
        "Probability from which xtc_probability excludes a choice. Above 0.5 is off.",
        between=(0, 1),
        gguf="general.sampling.xtc_threshold",
    )
    dynatemp_range: float = parameter(
        0.0,
        "The temperature lies between temperature minus and plus this number: low where the model is sure. 0 is off.",
        between=(0, 100),
    )
    dynatemp_exponent: float = parameter(
        1.0,
        "How the temperature follows the entropy with dynatemp_range: below 1 it rises earlier, above 1 later.",
        between=(0, 100),
    )
    dry_multiplier: float = parameter(
        0.0,
        "Subtracted from the logit of a token that would make a repetition longer than dry_allowed_length by one token; "
        "for each further token, dry_base times as much. 0 is off.",
        between=(0, 100),
    )
    dry_base: float = parameter(1.75, "Growth of dry_multiplier with the length of the repetition.", between=(1, 10))
    dry_allowed_length: int = parameter(
        2, "Tokens of a repetition from which dry_multiplier makes the next one less likely.", between=(1, 512)
    )
    dry_penalty_last_n: int = parameter(
        4096,
        "How many tokens dry_multiplier looks back, over prompt and answer together. 0 is off.",
        between=(0, 4096),
        minus_one=4096,
    )
    mirostat: int = parameter(
        0,
        "With 2, sample from tokens whose surprise is below a limit that each draw corrects, so that the mean comes near "
        "mirostat_tau. All other filters, such as top_k, are left out. 0 is off; there is no version 1.",
        between=(0, 2),
        multiple_of=2,
        gguf="general.sampling.mirostat",
    )
    mirostat_tau: float = parameter(
        5.0,
        "The surprise of a token that mirostat aims at, in bits.",
        between=(0, 100),
        gguf="general.sampling.mirostat_tau",
    )
    mirostat_eta: float = parameter(
        0.1,
        "How quickly mirostat corrects itself: the share of a token's deviation from mirostat_tau.",
        between=(0, 1),
        gguf="general.sampling.mirostat_eta",
    )


def _rows(cls: type) -> tuple[Any, ...]:
    """The rows that the fields of ``cls`` declare."""
    hints = typing.get_type_hints(cls)
    rows = []
    for attribute in attrs.fields(cls):
        hint = hints[attribute.name]
        parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        kinds = tuple(part for part in parts if part is not types.NoneType)
        rows.append(attrs.evolve(attribute.metadata["row"], name=attribute.name, kinds=kinds))
    return tuple(rows)


def _with_flag(row: Parameter) -> Parameter:
    flag = f"--{row.name.replace('_', '-')}"
    return attrs.evolve(row, flags=(flag,) if row.short is None else (flag, row.short))


PARAMETERS: Final[tuple[Parameter, ...]] = tuple(map(_with_flag, _rows(SamplingValues)))
"""The sampling parameters."""

ROWS: Final[tuple[Field, ...]] = (*_rows(PlainFields), *PARAMETERS)
"""All rows."""

BUILT_IN: Final[Mapping[str, Any]] = {row.name: row.default for row in PARAMETERS}
"""The default of each parameter."""


def with_fields(rows: Sequence[Field], field: Callable[[Any], Any]) -> Callable[[T], T]:
    """Decorate an attrs class: it gets a field for each row.

    Args:
        field: makes the field of a row, an ``attrs.field`` with a type.
    """

    def extended(cls: T) -> T:
        fields = {row.name: field(row) for row in rows}
        made: Any = attrs.make_class(cls.__name__, fields, bases=(cls,), frozen=True, slots=True, kw_only=True)
        made.__doc__, made.__module__, made.__qualname__ = cls.__doc__, cls.__module__, cls.__qualname__
        return made  # type: ignore[no-any-return]

    return extended


def given(fields: object) -> dict[str, Any]:
    """The parameters that a request or the settings give, by name."""
    return {row.name: value for row in PARAMETERS if (value := getattr(fields, row.name)) is not None}
