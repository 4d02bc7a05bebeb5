"""The list ``models:`` of the file: several models, each with the settings that it does not share."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from uma_trio.config.checks import check_consistency
from uma_trio.config.fields import SECTIONS, Config, ModelEntry
from uma_trio.config.refusal import ConfigError, shown
from uma_trio.config.values import Setting, settings

OF_THE_DAEMON: Final = frozenset({"model", "alias", "models_dir", "offline", "llama_dir", "engine"})
"""Settings of the sections below that a model cannot have for itself; two of them are keys with another meaning."""
OF_A_MODEL: Final = frozenset({"model", "engine", "scheduling", "sampling", "sessions"})
"""Sections whose settings a model may have for itself."""
ALSO_OF_A_MODEL: Final = frozenset(
    {
        "idle_unload_s",
        "max_queue",
        "max_prompt_bytes",
        "max_prompt_tokens",
        "max_tokens",
        "default_max_tokens",
        "request_timeout_s",
    }
)
"""Settings of other sections that a model may have for itself."""

CLASSES: Final = ("pinned", "normal")
LOADS: Final = ("start", "demand")
OWN_KEYS: Final = ("name", "model", "alias", "class", "load")
MAX_MODELS: Final = 256
MAX_NAME: Final = 256


def model_settings() -> dict[str, Setting]:
    """The settings that a model may have for itself, by name."""
    return {
        setting.name: setting
        for setting in settings()
        if setting.name not in OF_THE_DAEMON and (setting.section in OF_A_MODEL or setting.name in ALSO_OF_A_MODEL)
    }


def parse_models(value: Any, source: str) -> tuple[ModelEntry, ...]:
    """Convert the list ``models:`` of a file.

    Raises:
        ConfigError: it is no such list.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_MODELS:
        raise ConfigError(f"{source}: models must be a list of at most {MAX_MODELS} models, each with a key model")
    return tuple([_entry(item, f"{source}: models[{index}]") for index, item in enumerate(value)])


def _entry(entry: Any, source: str) -> ModelEntry:
    if isinstance(entry, str):
        entry = {"model": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str) or not entry["model"]:
        raise ConfigError(f"{source}: a model needs a key model, with a name or a path")
    known = model_settings()
    aliases = entry.get("alias") or []
    if isinstance(aliases, str):
        aliases = [aliases]
    names = [*([entry["name"]] if entry.get("name") is not None else []), *aliases]
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ConfigError(f"{source}: a name has 1 to {MAX_NAME} characters, and {shown(name)} is none")
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key in OWN_KEYS:
            continue
        if key not in known:
            near = difflib.get_close_matches(str(key), [*known, *OWN_KEYS], n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "docs/CONFIG.md lists what it may have"
            raise ConfigError(f"{source}: a model has no setting {shown(key)} of its own; {hint}")
        values[key] = known[key].convert(value, source)
    return ModelEntry(
        model=entry["model"],
        name=entry.get("name"),
        alias=tuple(aliases),
        model_class=_one_of(CLASSES, entry.get("class", "normal"), "class", source),
        load=_one_of(LOADS, entry.get("load", "start"), "load", source),
        settings=values,
    )


def _one_of(choices: Sequence[str], value: Any, key: str, source: str) -> Any:
    if value not in choices:
        raise ConfigError(f"{source}: {key} must be one of {', '.join(choices)}, not {shown(value)}")
    return value


def settings_of_model(config: Config, entry: ModelEntry) -> Config:
    """The settings with which one model is served: its own, and otherwise the daemon's.

    Raises:
        ConfigError: they contradict each other.
    """
    known = model_settings()
    fields: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in entry.settings.items():
        fields[known[name].section][known[name].field] = value
    fields["model"] |= {"model": entry.model, "alias": entry.name}
    changed = {name: attrs.evolve(getattr(config, name), **values) for name, values in fields.items() if values}
    changed_config = attrs.evolve(config, models=(), **changed)
    check_consistency(changed_config)
    return changed_config


def models_of(config: Config) -> list[Config]:
    """The settings of each model, the default one first."""
    return [settings_of_model(config, entry) for entry in config.models] or [config]


def to_plain(entry: ModelEntry) -> Mapping[str, Any]:
    """An entry as a file has it."""
    fields: dict[str, Any] = {"name": entry.name, "model": entry.model, "alias": [*entry.alias]}
    fields |= {"class": entry.model_class, "load": entry.load, **entry.settings}
    return {key: to_plain_value(value) for key, value in fields.items() if value is not None and value != []}


def to_plain_value(value: Any) -> Any:
    """A setting's value as a file has it."""
    if isinstance(value, list | tuple):
        return [attrs.asdict(item) if attrs.has(type(item)) else item for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)  # a path
