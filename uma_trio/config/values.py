"""One setting and its values: types, units, bounds."""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import attrs

from uma_trio.config.fields import MB, SECTIONS
from uma_trio.config.lists import LISTS
from uma_trio.config.refusal import ConfigError, is_encodable, shown
from uma_trio.protocol.parameters import in_steps

_BOOLEANS: Final = {"yes": "true", "on": "true", "no": "false", "off": "false", "": "false"}
"""How the environment may spell booleans, in addition to true, false, 1 and 0."""

_DURATIONS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
"""Seconds by suffix."""

_SIZES: Final = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}{rest}": 1024**power for power, letter in enumerate("kmgt", 1) for rest in ("", "ib")},
}
"""Bytes by suffix in lower case.  A letter alone is a power of 1024."""

_COUNTS: Final = {letter: 1024**power for power, letter in enumerate("kmg", 1)}
"""A context of 32k is 32768 tokens."""

_WITH_SUFFIX: Final = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)

Unit = Literal["s", "ms", "bytes", "mb", "count"]

_METAVARS: Final[Mapping[Unit, str]] = {"s": "TIME", "ms": "TIME", "bytes": "SIZE", "mb": "SIZE", "count": "N"}


@attrs.frozen
class Setting:
    """One setting, as the file, the environment, the flags and the documentation see it."""

    section: str
    field: str
    """Its attribute in the class of the section."""
    name: str
    """Its unique name, and its key in files."""
    type: Any
    default: Any
    help: str
    bounds: Mapping[str, float]
    """``ge``, ``gt`` and ``le``; empty unless it is a number."""
    is_optional: bool = False
    """Whether it may be ``None``, which means "not given"."""
    short: str | None = None
    """A second spelling of the flag, if it has one."""
    given_metavar: str | None = None
    """What the help shows in place of the value, if the type does not say it."""

    @property
    def is_list(self) -> bool:
        """Whether the flag can be repeated."""
        return typing.get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, if there is a fixed set of them."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def variable(self) -> str:
        return f"UMA_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def unit(self) -> Unit | None:
        """The unit of a number, which decides what suffixes it may have.  ``None``: no suffix."""
        ending = self.name.rpartition("_")[2]
        if self.type in (int, float) and ending in ("s", "ms", "bytes", "mb"):
            return typing.cast(Unit, ending)
        return "count" if self.type is int else None

    @property
    def metavar(self) -> str:
        """What the help shows in place of the value."""
        if self.given_metavar is not None:
            return self.given_metavar
        if self.choices:
            return "|".join(self.choices)
        if self.unit is not None:
            return _METAVARS[self.unit]
        return {float: "X", str: "NAME|FILE"}.get(self.type, "PATH")

    def convert(self, value: Any, source: str) -> Any:
        """Convert ``value`` to the type of this setting, and check its bounds.

        Numbers and booleans may be given as text, numbers with a suffix.  For an optional setting, ``None`` and the
        empty text mean "not given".

        Args:
            source: where the value comes from, for the error message.

        Raises:
            ConfigError: the value has the wrong type or is out of bounds.
        """
        import msgspec  # late: the help of commands must not wait for this import

        if self.is_list:
            return LISTS[self.name].convert(value, source)
        if self.is_optional and (value is None or value == ""):
            return None
        raw = value
        if isinstance(value, str) and ("\0" in value or not is_encodable(value, bytes_too=self.type in (str, Path))):
            raise self._refusal(value, source)
        is_text = isinstance(value, str) and self.type in (int, float, bool)
        if is_text:
            raw = value.strip()
            raw = _BOOLEANS.get(raw.lower(), raw) if self.type is bool else self._without_suffix(raw)
        try:
            annotated = Annotated[self.type, msgspec.Meta(**self.bounds)]  # type: ignore[name-defined]
            return msgspec.convert(raw, annotated, strict=not is_text, dec_hook=_path)
        except (msgspec.ValidationError, RuntimeError):  # RuntimeError: ~user, and there is no such user
            raise self._refusal(value, source) from None

    def _refusal(self, value: object, source: str) -> ConfigError:
        return ConfigError(f"{source}: {self.name} must be {self.expected}, not {shown(value)}")

    def _without_suffix(self, text: str) -> str | float:
        """The number that ``text`` with a suffix stands for, in this setting's unit; ``text`` without a known one."""
        match = _WITH_SUFFIX.fullmatch(text)
        if match is None:
            return text
        suffixes = {"s": _DURATIONS, "ms": _DURATIONS, "count": _COUNTS}.get(self.unit or "", _SIZES)
        factor = suffixes.get(match[2].lower()) if self.unit else None
        if factor is None:
            return text
        number: float = float(match[1]) * factor / {"ms": 1e-3, "mb": MB}.get(self.unit or "", 1)
        if math.isinf(number):
            return text
        if self.type is float:
            return number
        if self.unit == "mb":  # limits: rounded down
            return int(number)
        return int(number) if number.is_integer() else text

    @property
    def expected(self) -> str:
        """A description of the allowed values."""
        if self.is_list:
            return f"a list of {LISTS[self.name].items}"
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(self.type, "a path")
        if not self.bounds:
            return kind
        if "multiple_of" in self.bounds:
            return in_steps(**self.bounds)
        lower = f"from {self.bounds['ge']:.10g}" if "ge" in self.bounds else f"above {self.bounds['gt']:g}, up"
        return f"{kind} {lower} to {self.bounds['le']:.10g}"


def _path(_: type, value: Any) -> Path:
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ValueError("not a path")
    return Path(value).expanduser()


@functools.cache
def settings() -> tuple[Setting, ...]:
    """All settings, in the order of ``fields.py``."""
    return tuple(_settings())


def _settings() -> Iterator[Setting]:
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in attrs.fields(cls):
            meta, hint = field.metadata, hints[field.name]
            kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            is_optional = isinstance(hint, types.UnionType)
            yield Setting(
                section=section,
                field=field.name,
                name=meta["name"] or field.name,
                type=kinds[0] if is_optional else hint,
                is_optional=is_optional,
                default=field.default,
                help=meta["help"],
                bounds=meta["bounds"],
                short=meta["short"],
                given_metavar=meta["metavar"],
            )
