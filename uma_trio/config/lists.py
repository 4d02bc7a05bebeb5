"""Settings that are lists: what one may have, in a YAML file, or as text with commas in a flag or a variable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from uma_trio.config.fields import Adapter
from uma_trio.config.refusal import ConfigError, is_encodable, shown
from uma_trio.config.tensor_pattern import problem_of

MAX_ADAPTERS: Final = 64
"""LoRA adapters of a model."""
MAX_ADAPTER_SCALE: Final = 16
"""As in requests."""
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""No colon, which separates model and adapter where a request names both as one."""

MAX_DEVICES: Final = 16
"""Devices of a model, in llama.cpp."""
MAX_OVERRIDES: Final = 64
NO_DEVICES: Final = "none"
"""In place of names of devices: the CPU alone."""
_NAME: Final = re.compile(r"[!-+\--~]{1,128}")
"""Printable ASCII without blanks and commas."""
_OVERRIDE: Final = re.compile(r"(.*?)=([^,=\s]{1,128})(?:,|$)")
_ENDPOINT: Final = re.compile(r"[A-Za-z0-9._-]{1,253}:[1-9][0-9]{0,4}")


@attrs.frozen
class ListType:
    """How a list is written, and how it is read."""

    items: str
    """What it has, in words."""
    convert: Callable[[Any, str], tuple[Any, ...]]
    """Gets the value and where it comes from; raises ``ConfigError``."""


def adapters(value: Any, source: str) -> tuple[Adapter, ...]:
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
    if not found.path or "\0" in found.path or not is_encodable(found.path, bytes_too=True):
        raise ConfigError(f"{source}: the adapter {found.name} needs a file: {found.name}=FILE")
    if not abs(found.scale) <= MAX_ADAPTER_SCALE:  # also refuses nan
        raise ConfigError(
            f"{source}: the scale of the adapter {found.name} must be a number from -{MAX_ADAPTER_SCALE} to "
            f"{MAX_ADAPTER_SCALE}, not {found.scale}"
        )
    return found


def devices(value: Any, source: str) -> tuple[str, ...]:
    """Names of devices, or ``none`` alone."""
    found = tuple(_texts("devices", value, source, MAX_DEVICES))
    for name in found:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{source}: devices must be names such as CUDA0, or none, not {shown(name)}")
        if found.count(name) > 1:
            raise ConfigError(f"{source}: devices has {name} twice; name each device once")
    if NO_DEVICES in found and len(found) > 1:
        raise ConfigError(
            f"{source}: devices has none, which stands for the CPU alone, next to others; remove one of them"
        )
    return found


def tensor_split(value: Any, source: str) -> tuple[float, ...]:
    """A share for each device."""
    shares = []
    for each in _items("tensor_split", [value] if isinstance(value, int | float) else value, source, MAX_DEVICES):
        try:
            share = float(each) if isinstance(each, str | int | float) and not isinstance(each, bool) else math.nan
        except (ValueError, OverflowError):
            share = math.nan
        if not 0 <= share <= 1e9:  # also refuses nan
            raise ConfigError(f"{source}: tensor_split must have numbers from 0 to 1e9, such as 3,1, not {shown(each)}")
        shares.append(share)
    if shares and not any(shares):
        raise ConfigError(f"{source}: tensor_split has a share of 0 for every device; give one of them more")
    return tuple(shares)


def override_tensor(value: Any, source: str) -> tuple[str, ...]:
    """``PATTERN=BUFFER``; as text with commas in between, which patterns may have too."""
    found: list[str] = []
    for each in _items("override_tensor", [value] if isinstance(value, str) else value, source, MAX_OVERRIDES):
        text, at = each.strip() if isinstance(each, str) else each, 0
        if not isinstance(text, str) or len(text) > 8192:
            raise ConfigError(f"{source}: override_tensor must have texts PATTERN=BUFFER, not {shown(each)}")
        while at < len(text):
            match = _OVERRIDE.match(text, at)
            if match is None:
                raise ConfigError(
                    f"{source}: override_tensor must be PATTERN=BUFFER, such as blk\\.0\\.ffn_.*=CPU, not {shown(text[at:])}"
                )
            if problem := problem_of(match[1]):
                raise ConfigError(
                    f"{source}: the pattern {shown(match[1])} of override_tensor cannot be used: {problem}"
                )
            found.append(f"{match[1]}={match[2]}")
            at = match.end()
    if len(found) > MAX_OVERRIDES:
        raise ConfigError(f"{source}: override_tensor has {len(found)} patterns; {MAX_OVERRIDES} are the most")
    return tuple(found)


def rpc(value: Any, source: str) -> tuple[str, ...]:
    """Addresses of RPC servers."""
    found = tuple(_texts("rpc", value, source, MAX_DEVICES))
    for each in found:
        if not _ENDPOINT.fullmatch(each) or int(each.rpartition(":")[2]) > 65535:
            raise ConfigError(f"{source}: rpc must have addresses HOST:PORT, not {shown(each)}")
    return tuple(dict.fromkeys(found))


def _texts(name: str, value: Any, source: str, most: int) -> Iterator[str]:
    for each in _items(name, value, source, most):
        if not isinstance(each, str):
            raise ConfigError(f"{source}: {name} must be a list of texts, and has {shown(each)}")
        yield each.strip()


def _items(name: str, value: Any, source: str, most: int) -> list[Any]:
    """The items of a list, of a text with commas, or of a list of such texts."""
    if value is None or value == "":
        return []
    given = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, dict) or not all(isinstance(each, str | int | float) for each in given):
        raise ConfigError(f"{source}: {name} must be a list, not {shown(value)}")
    splits = name != "override_tensor"
    found = [part for each in given for part in (each.split(",") if isinstance(each, str) and splits else [each])]
    if len(found) > most:
        raise ConfigError(f"{source}: {name} has {len(found)} entries; {most} are the most")
    return found


LISTS: Final = {
    "adapters": ListType("NAME=FILE", adapters),
    "devices": ListType("names", devices),
    "tensor_split": ListType("numbers", tensor_split),
    "override_tensor": ListType("PATTERN=BUFFER", override_tensor),
    "rpc": ListType("HOST:PORT", rpc),
}
"""The settings that are lists, by name."""
