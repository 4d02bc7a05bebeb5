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
    parsed = [_adapter(item, source) for item in given]
    names = [adapter.name for adapter in parsed]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{source}: adapters has the name {name} twice; give each adapter a name of its own")
    return tuple(parsed)


def _adapter(value: Any, source: str) -> Adapter:
    import msgspec

    if isinstance(value, str):
        name, separator, path = value.strip().partition("=")
        value = {"name": name, "path": path} if separator else value
    try:
        adapter = msgspec.convert(value, Adapter)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{source}: each of adapters must be NAME=FILE, or in a YAML file {{name: NAME, path: FILE, scale: 1.0}}, not "
            f"{shown(value)}"
        ) from None
    unknown = [key for key in value if key not in ("name", "path", "scale")] if isinstance(value, dict) else []
    if unknown:
        raise ConfigError(f"{source}: an adapter has the unknown key {shown(unknown[0])}; known are name, path, scale")
    if not ADAPTER_NAME.fullmatch(adapter.name):
        raise ConfigError(
            f"{source}: an adapter's name must be 1 to 64 letters, digits and ._- and begin with a letter or a digit, not "
            f"{shown(adapter.name)}"
        )
    if not adapter.path or "\0" in adapter.path or not is_encodable(adapter.path, bytes_too=True):
        raise ConfigError(f"{source}: the adapter {adapter.name} needs a file: {adapter.name}=FILE")
    if not abs(adapter.scale) <= MAX_ADAPTER_SCALE:  # also refuses nan
        raise ConfigError(
            f"{source}: the scale of the adapter {adapter.name} must be a number from -{MAX_ADAPTER_SCALE} to "
            f"{MAX_ADAPTER_SCALE}, not {adapter.scale}"
        )
    return adapter


def devices(value: Any, source: str) -> tuple[str, ...]:
    """Names of devices, or ``none`` alone."""
    names = tuple(_texts("devices", value, source, MAX_DEVICES))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{source}: devices must be names such as CUDA0, or none, not {shown(name)}")
        if names.count(name) > 1:
            raise ConfigError(f"{source}: devices has {name} twice; name each device once")
    if NO_DEVICES in names and len(names) > 1:
        raise ConfigError(
            f"{source}: devices has none, which stands for the CPU alone, next to others; remove one of them"
        )
    return names


def tensor_split(value: Any, source: str) -> tuple[float, ...]:
    """A share for each device."""
    shares = []
    for item in _items("tensor_split", [value] if isinstance(value, int | float) else value, source, MAX_DEVICES):
        try:
            share = float(item) if isinstance(item, str | int | float) and not isinstance(item, bool) else math.nan
        except (ValueError, OverflowError):
            share = math.nan
        if not 0 <= share <= 1e9:  # also refuses nan
            raise ConfigError(f"{source}: tensor_split must have numbers from 0 to 1e9, such as 3,1, not {shown(item)}")
        shares.append(share)
    if shares and not any(shares):
        raise ConfigError(f"{source}: tensor_split has a share of 0 for every device; give one of them more")
    return tuple(shares)


def override_tensor(value: Any, source: str) -> tuple[str, ...]:
    """``PATTERN=BUFFER``; as text with commas in between, which patterns may have too."""
    overrides: list[str] = []
    for item in _items("override_tensor", [value] if isinstance(value, str) else value, source, MAX_OVERRIDES):
        text, at = item.strip() if isinstance(item, str) else item, 0
        if not isinstance(text, str) or len(text) > 8192:
            raise ConfigError(f"{source}: override_tensor must have texts PATTERN=BUFFER, not {shown(item)}")
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
            overrides.append(f"{match[1]}={match[2]}")
            at = match.end()
    if len(overrides) > MAX_OVERRIDES:
        raise ConfigError(f"{source}: override_tensor has {len(overrides)} patterns; {MAX_OVERRIDES} are the most")
    return tuple(overrides)


def rpc(value: Any, source: str) -> tuple[str, ...]:
    """Addresses of RPC servers."""
    addresses = tuple(_texts("rpc", value, source, MAX_DEVICES))
    for address in addresses:
        if not _ENDPOINT.fullmatch(address) or int(address.rpartition(":")[2]) > 65535:
            raise ConfigError(f"{source}: rpc must have addresses HOST:PORT, not {shown(address)}")
    return tuple(dict.fromkeys(addresses))


def _texts(name: str, value: Any, source: str, most: int) -> Iterator[str]:
    for item in _items(name, value, source, most):
        if not isinstance(item, str):
            raise ConfigError(f"{source}: {name} must be a list of texts, and has {shown(item)}")
        yield item.strip()


def _items(name: str, value: Any, source: str, most: int) -> list[Any]:
    """The items of a list, of a text with commas, or of a list of such texts."""
    if value is None or value == "":
        return []
    given = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, dict) or not all(isinstance(item, str | int | float) for item in given):
        raise ConfigError(f"{source}: {name} must be a list, not {shown(value)}")
    splits = name != "override_tensor"
    items = [part for item in given for part in (item.split(",") if isinstance(item, str) and splits else [item])]
    if len(items) > most:
        raise ConfigError(f"{source}: {name} has {len(items)} entries; {most} are the most")
    return items


LISTS: Final = {
    "adapters": ListType("NAME=FILE", adapters),
    "devices": ListType("names", devices),
    "tensor_split": ListType("numbers", tensor_split),
    "override_tensor": ListType("PATTERN=BUFFER", override_tensor),
    "rpc": ListType("HOST:PORT", rpc),
}
"""The settings that are lists, by name."""
