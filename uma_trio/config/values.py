"""One setting and its values: types, units, bounds."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import attrs

from uma_trio.config.fields import MB, SECTIONS, Adapter


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of bounds.  The message says where it was set."""


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

MAX_ADAPTERS: Final = 64
"""LoRA adapters of a model."""
MAX_ADAPTER_SCALE: Final = 16
"""As in requests."""
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""No colon, which separates model and adapter where a request names both as one."""

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
            return _adapters(value, source)
        if self.is_optional and (value is None or value == ""):
            return None
        raw = value
        if isinstance(value, str) and ("\0" in value or not _is_encodable(value, bytes_too=self.type in (str, Path))):
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
            return "a list of NAME=FILE"
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a name or a path"}.get(
            self.type, "a path"
        )
        if not self.bounds:
            return kind
        lower = f"from {self.bounds['ge']:.10g}" if "ge" in self.bounds else f"above {self.bounds['gt']:g}, up"
        return f"{kind} {lower} to {self.bounds['le']:.10g}"


MAX_SHOWN: Final = 100
"""Characters of a value in an error."""


def shown(value: object) -> str:
    """Describe a value in an error: short, whatever its size is."""
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return "a number with many digits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _is_encodable(text: str, *, bytes_too: bool) -> bool:
    """Whether ``text`` can be encoded.

    Args:
        bytes_too: it may have bytes that are not UTF-8, which paths may have.
    """
    try:
        text.encode("utf-8", "surrogateescape" if bytes_too else "strict")
    except UnicodeEncodeError:
        return False
    return True


def _path(_: type, value: Any) -> Path:
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ValueError("not a path")
    return Path(value).expanduser()


def _adapters(value: Any, source: str) -> tuple[Adapter, ...]:
    """The adapters that ``value`` lists: texts ``NAME=FILE`` or maps; or one text with commas, as in a variable.

    Raises:
        ConfigError: it is something else, or a name is there twice.
    """
    given = value.split(",") if isinstance(value, str) else value
    if given is None or given == [""]:
        return ()
    if not isinstance(given, list | tuple) or len(given) > MAX_ADAPTERS:
        raise ConfigError(f"{source}: adapters must be a list of at most {MAX_ADAPTERS}, not {shown(value)}")
    found = [_adapter(each, source) for each in given]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{source}: adapters has the name {name} twice; give each adapter a name of its own")
    return tuple(found)


def _adapter(value: Any, source: str) -> Adapter:
    import msgspec

    if isinstance(value, str):
        name, separator, path = value.strip().partition("=")
        value = {"name": name, "path": path} if separator else value
    try:
        found = msgspec.convert(value, Adapter)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{source}: each of adapters must be NAME=FILE, or in a YAML file {{name: NAME, path: FILE, scale: 1.0}}, not "
            f"{shown(value)}"
        ) from None
    unknown = [key for key in value if key not in ("name", "path", "scale")] if isinstance(value, dict) else []
    if unknown:
        raise ConfigError(f"{source}: an adapter has the unknown key {shown(unknown[0])}; known are name, path, scale")
    if not ADAPTER_NAME.fullmatch(found.name):
        raise ConfigError(
            f"{source}: an adapter's name must be 1 to 64 letters, digits and ._- and begin with a letter or a digit, not "
            f"{shown(found.name)}"
        )
    if not found.path or "\0" in found.path or not _is_encodable(found.path, bytes_too=True):
        raise ConfigError(f"{source}: the adapter {found.name} needs a file: {found.name}=FILE")
    if not abs(found.scale) <= MAX_ADAPTER_SCALE:  # also refuses nan
        raise ConfigError(
            f"{source}: the scale of the adapter {found.name} must be a number from -{MAX_ADAPTER_SCALE} to "
            f"{MAX_ADAPTER_SCALE}, not {found.scale}"
        )
    return found


def settings() -> Iterator[Setting]:
    """Yield all settings, in the order of ``fields.py``."""
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
