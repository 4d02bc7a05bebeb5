"""The table of sampling parameters: name, type, bounds, default, other names, and a sentence for each.

Everything else about a parameter follows from its row:

- the field of a request (``Generate``), of the settings (``config.Sampling``) and of the engine (``SamplingParams``);
- the flags of ``serve``, ``ask`` and ``chat``, the fields of the HTTP APIs, the options of Ollama's API;
- what llama-server's API reports, the attributes of traces, the form of the dashboard, the tables of the documents.

``engine/sampling/sampler.py`` says what a parameter does.  This module is imported by every command, so it imports little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import attrs

T = TypeVar("T", bound=type)


@attrs.frozen(kw_only=True)
class Parameter:
    """One row of the table."""

    name: str = ""
    """In requests, settings and the engine."""
    type: type = float
    default: Any
    """Without a request, a setting and a model file that say otherwise."""
    help: str
    bounds: Mapping[str, Any]
    """``ge``, ``gt``, ``le`` and ``multiple_of``, as ``msgspec.Meta`` takes them."""
    short: str | None = None
    """A second spelling of the flag, that of llama.cpp's tools."""
    llama: str | None = None
    """Its name in the APIs of llama-server and Ollama, if they have another one."""
    gguf: str | None = None
    """Key with which a model file recommends a value.  Source: llama.h, ``LLAMA_MODEL_META_KEY_SAMPLING_*``."""
    minus_one: float | None = None
    """What -1 stands for in other APIs and in model files; ``None``: nothing, it is out of bounds."""
    is_traced: bool = False
    """Whether OpenTelemetry's conventions have an attribute for it."""

    @property
    def llama_name(self) -> str:
        """Its name in the APIs of llama-server and Ollama."""
        return self.llama or self.name

    @property
    def http_names(self) -> tuple[str, ...]:
        """Its names in bodies of HTTP requests."""
        return (self.name,) if self.llama is None else (self.name, self.llama)

    @property
    def flags(self) -> tuple[str, ...]:
        """Spellings of its flag."""
        flag = f"--{self.name.replace('_', '-')}"
        return (flag,) if self.short is None else (flag, self.short)

    def from_llama(self, value: Any) -> Any:
        """A value of llama-server's or Ollama's API as the socket protocol has it."""
        return self.minus_one if value == -1 and self.minus_one is not None else value


def parameter(default: float, help: str, **rest: Any) -> Any:
    """Declare a parameter.

    Args:
        rest: bounds and fields of ``Parameter``.
    """
    bounds: dict[str, Any] = {name: rest.pop(name) for name in ("ge", "gt", "le", "multiple_of") if name in rest}
    row = Parameter(type=type(default), default=default, help=help, bounds=bounds, **rest)
    return attrs.field(default=default, metadata={"row": row})


@attrs.frozen
class SamplingValues:
    """A value for each parameter."""

    temperature: float = parameter(
        0.0,
        "Divides the logits. 0 always takes the most likely token, so that the filters have no effect.",
        ge=0,
        le=100,
        short="--temp",
        gguf="general.sampling.temp",
        is_traced=True,
    )
    top_k: int = parameter(
        0,
        "Sample from this many most likely tokens. 0 is off.",
        ge=0,
        le=2**31 - 1,
        minus_one=0,
        gguf="general.sampling.top_k",
        is_traced=True,
    )
    top_p: float = parameter(
        1.0,
        "Sample from the smallest set of most likely tokens that together have this probability. 1 is off.",
        gt=0,
        le=1,
        gguf="general.sampling.top_p",
        is_traced=True,
    )
    min_p: float = parameter(
        0.0,
        "Sample from tokens with at least this fraction of the most likely token's probability. 0 is off.",
        ge=0,
        le=1,
        gguf="general.sampling.min_p",
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divides positive logits, and multiplies negative ones, of the last repeat_last_n tokens. 1 is off.",
        ge=0.1,
        le=10,
        short="--repeat-penalty",
        llama="repeat_penalty",
        gguf="general.sampling.penalty_repeat",
    )
    repeat_last_n: int = parameter(
        64,
        "Window of repetition_penalty, in tokens of prompt and answer together. 0 is off.",
        ge=0,
        le=4096,
        minus_one=4096,
        gguf="general.sampling.penalty_last_n",
    )
    frequency_penalty: float = parameter(
        0.0,
        "Subtracted from a token's logit for each time that the answer contains it. 0 is off.",
        ge=-2,
        le=2,
        is_traced=True,
    )
    presence_penalty: float = parameter(
        0.0,
        "Subtracted once from the logit of each token that the answer contains. 0 is off.",
        ge=-2,
        le=2,
        is_traced=True,
    )
    top_n_sigma: float = parameter(
        0.0,
        "Sample from tokens whose logit is at most this many standard deviations of all logits below the largest one. "
        "0 is off.",
        ge=0,
        le=100,
        minus_one=0,
    )
    typical_p: float = parameter(
        1.0,
        "Sample from the tokens whose surprise is nearest to the expected one, and that together have this probability. "
        "1 is off.",
        gt=0,
        le=1,
    )
    xtc_probability: float = parameter(
        0.0,
        "Chance for each token that its most likely choices are excluded: all that have xtc_threshold, except the least "
        "likely one of them. 0 is off.",
        ge=0,
        le=1,
        gguf="general.sampling.xtc_probability",
    )
    xtc_threshold: float = parameter(
        0.1,
        "Probability from which xtc_probability excludes a choice. Above 0.5 is off.",
        ge=0,
        le=1,
        gguf="general.sampling.xtc_threshold",
    )
    dynatemp_range: float = parameter(
        0.0,
        "The temperature lies between temperature minus and plus this number: low where the model is sure. 0 is off.",
        ge=0,
        le=100,
    )
    dynatemp_exponent: float = parameter(
        1.0,
        "How the temperature follows the entropy with dynatemp_range: below 1 it rises earlier, above 1 later.",
        ge=0,
        le=100,
    )
    dry_multiplier: float = parameter(
        0.0,
        "Subtracted from the logit of a token that would make a repetition longer than dry_allowed_length by one token; "
        "for each further token, dry_base times as much. 0 is off.",
        ge=0,
        le=100,
    )
    dry_base: float = parameter(1.75, "Growth of dry_multiplier with the length of the repetition.", ge=1, le=10)
    dry_allowed_length: int = parameter(
        2, "Tokens of a repetition from which dry_multiplier makes the next one less likely.", ge=1, le=512
    )
    dry_penalty_last_n: int = parameter(
        4096,
        "How many tokens dry_multiplier looks back, over prompt and answer together. 0 is off.",
        ge=0,
        le=4096,
        minus_one=4096,
    )
    mirostat: int = parameter(
        0,
        "With 2, sample from tokens whose surprise is below a limit that each draw corrects, so that the mean comes near "
        "mirostat_tau. All other filters, such as top_k, are left out. 0 is off; there is no version 1.",
        ge=0,
        le=2,
        multiple_of=2,
        gguf="general.sampling.mirostat",
    )
    mirostat_tau: float = parameter(
        5.0,
        "The surprise of a token that mirostat aims at, in bits.",
        ge=0,
        le=100,
        gguf="general.sampling.mirostat_tau",
    )
    mirostat_eta: float = parameter(
        0.1,
        "How quickly mirostat corrects itself: the share of a token's deviation from mirostat_tau.",
        ge=0,
        le=1,
        gguf="general.sampling.mirostat_eta",
    )


PARAMETERS: Final[tuple[Parameter, ...]] = tuple(
    attrs.evolve(field.metadata["row"], name=field.name) for field in attrs.fields(SamplingValues)
)
"""The rows."""

BUILT_IN: Final[Mapping[str, Any]] = {row.name: row.default for row in PARAMETERS}
"""The default of each parameter."""


def with_parameters(field: Callable[[Parameter], Any]) -> Callable[[T], T]:
    """Decorate an attrs class: it gets a field for each parameter.

    Args:
        field: makes the field of a parameter, an ``attrs.field`` with a type.
    """

    def extended(cls: T) -> T:
        fields = {row.name: field(row) for row in PARAMETERS}
        found: Any = attrs.make_class(cls.__name__, fields, bases=(cls,), frozen=True, slots=True, kw_only=True)
        found.__doc__, found.__module__, found.__qualname__ = cls.__doc__, cls.__module__, cls.__qualname__
        return found  # type: ignore[no-any-return]

    return extended


def given(fields: object) -> dict[str, Any]:
    """The parameters that a request or the settings give, by name."""
    return {row.name: value for row in PARAMETERS if (value := getattr(fields, row.name)) is not None}
