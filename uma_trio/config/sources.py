"""Where settings come from: the defaults, a YAML file, the environment, flags; and back to YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from uma_trio.config.checks import check_consistency
from uma_trio.config.fields import SECTIONS, Config, ModelEntry
from uma_trio.config.models import parse_models, settings_of_model, to_plain, to_plain_value
from uma_trio.config.refusal import MAX_SHOWN, ConfigError, shown
from uma_trio.config.values import Setting, settings
from uma_trio.files import read_text

CLOSE: Final = 0.75
"""Similarity from which a name of another section is suggested."""

MAX_SCALAR: Final = 8192
"""Characters of a key or a value in a file.  Paths have at most 4096; YAML's numbers with colons take quadratic time."""


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Combine the defaults, the YAML ``file``, the ``UMA_*`` variables of ``environment``, and the ``flags``.

    Later sources override earlier ones.  A flag that is ``None`` is not given.  The flag ``model`` may have a list of
    values.  A model that the environment or a flag names takes the place of the file's list ``models``.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of bounds, two values contradict each
            other, or the file cannot be read.
    """
    known = {setting.name: setting for setting in settings()}
    values: dict[str, Any] = {}
    models: tuple[ModelEntry, ...] = ()
    if file is not None:
        sections = _sections(file)
        models = parse_models(sections.pop("models", None), str(file))
        values.update(_from_file(file, sections, known))
        if models and values.get("model") is not None:
            raise ConfigError(
                f"{file}: the models to serve are in the list models; remove the key model of the section model"
            )
    from_environment = dict(_from_environment(environment or {}, known))
    values.update(from_environment)
    if from_environment.get("model") is not None:
        models = ()
    for name, value in (flags or {}).items():
        if name == "model" and isinstance(value, list | tuple):
            names = [known[name].convert(text, known[name].flag) for text in value]
            if names:
                models = tuple([ModelEntry(model=name_or_path) for name_or_path in names]) if len(names) > 1 else ()
                values[name] = None if models else names[0]
        elif value is not None and value != ():  # a flag that can be repeated and is not given
            values[name] = known[name].convert(value, known[name].flag)
            if name == "model":
                models = ()
    fields: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        fields[known[name].section][known[name].field] = value
    config = Config(**{section: cls(**fields[section]) for section, cls in SECTIONS.items()}, models=models)
    check_consistency(config)
    if models and config.model.alias is not None:
        raise ConfigError("alias is for one model; with several, give each of them a name in the list models")
    for entry in models:
        settings_of_model(config, entry)
    return config


# -- the file -------------------------------------------------------------------------------------------


def _sections(file: Path) -> dict[Any, Any]:
    remedy = "--config takes a file such as uma-trio serve --print-config prints"
    return {**_mapping(read_yaml(file, remedy), str(file))}


def _from_file(file: Path, sections: Mapping[Any, Any], known: Mapping[str, Setting]) -> Iterator[tuple[str, Any]]:
    for section, fields in sections.items():
        if section not in SECTIONS:
            raise _unknown_section(section, known, str(file))
        for name, value in _mapping(fields, f"{file}: {section}").items():
            if name not in known or known[name].section != section:
                raise _unknown_key(name, section, known, f"{file}: {section}")
            yield name, known[name].convert(value, f"{file}: {section}")


def read_yaml(file: Path, remedy: str) -> Any:
    """Parse a YAML file that a person wrote.

    Args:
        remedy: what to do if the file cannot be read.

    Raises:
        ConfigError: it cannot be read, is not YAML, or sets a key twice.
    """
    import yaml  # late: only needed with a file

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, which YAML forbids, while PyYAML takes the last one in silence.

        Also refuses what makes a small file large: aliases of lists and mappings, and scalars that no setting has.
        """

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            node = super().compose_node(parent, index)
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent) and not isinstance(node, yaml.ScalarNode):
                raise ConfigError(
                    f"{file}: the alias in line {line} stands for a list or a mapping; write its content instead"
                )
            if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_SCALAR:
                raise ConfigError(
                    f"{file}: line {line} has a value of {len(node.value):,} characters; a setting has at most "
                    f"{MAX_SCALAR:,}"
                )
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        raise ConfigError(
                            f"{file}: {_named(key.value)} is set in line {lines[key.value]} and again in line {line}; "
                            "remove one of them"
                        )
                    lines[key.value] = line
            return super().construct_mapping(node, deep)

    try:
        text = read_text(file, pipes=True)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {file}: it is not UTF-8 text; save it as UTF-8") from None
    try:
        return yaml.load(text, Loader)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"; look at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{file} is not YAML: {_named(error.problem or error.context)}{where}") from None
    except (yaml.YAMLError, ArithmeticError, ValueError) as error:  # an impossible date, a number with too many digits
        raise ConfigError(f"{file} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{file}: lists or mappings are nested too deeply; settings need a section and a key"
        ) from None


def _mapping(content: Any, source: str) -> dict[Any, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        if source.endswith(": model") and isinstance(content, str):
            raise ConfigError(
                f"{source}: expected keys and values; to choose a model write model: {{model: {content[:100]}}}"
            )
        raise ConfigError(f"{source}: expected keys and values, not {type(content).__name__}")
    return content


def _unknown_section(section: object, known: Mapping[str, Setting], source: str) -> ConfigError:
    section = _named(section)
    name = _spelled(section)
    if name in known:
        return ConfigError(
            f"{source}: {section} is a key of the section {known[name].section}; put it under {known[name].section}:"
        )
    return ConfigError(f"{source}: unknown section {section}{_hint(name, SECTIONS)}")


def _unknown_key(key: object, section: str, known: Mapping[str, Setting], source: str) -> ConfigError:
    key = _named(key)
    name = _spelled(key)
    here = [setting.name for setting in known.values() if setting.section == section]
    if name in known and name not in here:
        other = known[name].section
        return ConfigError(f"{source}: {key} is a key of the section {other}; put it under {other}:")
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
    if nearest and nearest[0] not in here:
        return ConfigError(
            f"{source}: unknown key {key}; did you mean {nearest[0]}, of the section {known[nearest[0]].section}?"
        )
    return ConfigError(f"{source}: unknown key {key}{_hint(name, here)}")


# -- the environment ------------------------------------------------------------------------------------


def _from_environment(environment: Mapping[str, str], known: Mapping[str, Setting]) -> Iterator[tuple[str, Any]]:
    by_variable = {setting.variable: setting for setting in known.values()}
    for variable, value in environment.items():
        if not variable.startswith("UMA_") or variable.startswith("UMA_TEST_"):
            continue
        if variable not in by_variable:
            name = _named(variable)
            raise ConfigError(f"the environment: unknown variable {name}{_hint(name, by_variable)}")
        yield by_variable[variable].name, by_variable[variable].convert(value, variable)


def _named(key: object) -> str:
    """A key in an error."""
    return key if isinstance(key, str) and key.isprintable() and len(key) <= MAX_SHOWN else shown(key)


def _spelled(key: str) -> str:
    """A key as names are spelled, for one that is spelled like a flag or a variable."""
    return key.lower().replace("-", "_").strip("_").removeprefix("uma_")


def _hint(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(sorted(known))}"


# -- back to YAML ---------------------------------------------------------------------------------------


def to_yaml(config: Config) -> str:
    """Write ``config`` as a YAML file with a comment for each setting.  ``load`` reads back an equal ``Config``."""
    import textwrap

    lines: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines += ["", f"{section}:"] if lines else [f"{section}:"]
        value = getattr(getattr(config, section), setting.field)
        plain = str(value) if isinstance(value, Path) else value
        if setting.is_list:
            plain = to_plain_value(value)
        lines += textwrap.wrap(
            setting.help, 96, initial_indent="  # ", subsequent_indent="  # ", break_on_hyphens=False
        )
        lines.append(f"  {setting.name}: {_yaml_value(plain)}")
    if config.models:
        lines += ["", "models:"]
        for entry in config.models:
            pairs = [f"{key}: {_yaml_value(value)}" for key, value in to_plain(entry).items()]
            lines += [f"  {'-' if index == 0 else ' '} {pair}" for index, pair in enumerate(pairs)]
    else:
        lines += ["", *MODELS_EXAMPLE]
    return "\n".join(lines) + "\n"


MODELS_EXAMPLE: Final = (
    "# Several models, each with settings of its own, in place of model.model:",
    "# models:",
    "#   - model: embedded",
    "#   - model: Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "#     name: small",
    "#     parallel: 2",
)


def _yaml_value(value: Any) -> str:
    import json

    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isascii() and c.isprintable() else f"\\U{ord(c):08X}" for c in text)
