"""What ``/set`` in a chat can set: the options of ``uma-trio chat``, with their types and bounds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Final

import click

from uma_trio.cli.exits import check_arguments
from uma_trio.cli.request_options import fields_of, options_but_model
from uma_trio.protocol.answers import ModelDescription

ELSEWHERE: Final = {"session": "/session NAME", "model": "/model NAME"}
"""Options that have a command of their own."""
FIELDS: Final = {
    **dict.fromkeys(("schema", "json_object", "regex", "choice", "grammar"), "constraint"),
    "adapter": "adapters",
    "priority": "slo",
}
"""The field of a request that an option sets, where their names differ."""
NAMES: Final = {"schema": "json-schema", "json": "json-object", "temp": "temperature"}
"""Shorter spellings."""
LEFT_OUT: Final = ("system", "session", "after", "show_reasoning")
"""Options of ``chat`` that ``/set`` cannot set: they belong to the whole conversation."""
OFF: Final = ("off", "default")
"""Values that remove a setting, so that the default of the model holds."""


class BadSetting(Exception):
    """There is no such setting, or it cannot have this value.  The message says what is possible."""


@click.command("set")
@options_but_model
def _options() -> None: ...


check_arguments(_options)
PARAMETERS: Final = {
    spelled.removeprefix("--"): parameter
    for parameter in _options.params
    if parameter.name not in LEFT_OUT
    for spelled in parameter.opts
}


def with_setting(fields: Mapping[str, Any], name: str, value: str) -> dict[str, Any]:
    """The fields of a request after ``/set name value``.

    Args:
        fields: the fields before.
        value: as on the command line; one of ``OFF`` removes the setting.

    Raises:
        BadSetting: there is no such setting, or it cannot have this value.
    """
    spelled = name.replace("_", "-").lower()
    spelled = NAMES.get(spelled, spelled)
    if spelled in ELSEWHERE:
        raise BadSetting(f"use {ELSEWHERE[spelled]}")
    parameter = PARAMETERS.get(spelled)
    if parameter is None or parameter.name is None:
        near = difflib.get_close_matches(spelled, PARAMETERS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"there are system, {', '.join(sorted(PARAMETERS))}"
        raise BadSetting(f"there is no setting {name}; {hint}")
    field = FIELDS.get(parameter.name, parameter.name)
    kept = {key: set_value for key, set_value in fields.items() if key != field}
    if value.lower() in OFF:
        return kept
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if value.lower() not in ("", "on"):
            raise BadSetting(f"{spelled} is on or off")
        arguments = [f"--{spelled}"]
    elif not value:
        raise BadSetting(f"give a value, as in /set {spelled} VALUE, or off")
    else:
        arguments = [f"--{spelled}={value}"]
    try:
        with _options.make_context("set", arguments, allow_interspersed_args=False) as context:
            return {**kept, **fields_of(context.params)}
    except click.UsageError as error:
        refused = error.message.removeprefix("--").replace("\n", " ")
        raise BadSetting(_expected(name, parameter.type) or refused) from None


def _expected(name: str, kind: click.ParamType[Any]) -> str | None:
    """What a setting can be; ``None`` if it is not a number: click's own message is shown then."""
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return None
    what = "a whole number" if isinstance(kind, click.IntRange) else "a number"
    lowest = f"above {kind.min}, up" if kind.min_open else f"from {kind.min}"
    highest = "on" if kind.max is None else f"to {kind.max}"
    return f"{name} is {what} {lowest} {highest}, or off"


def settings_text(model: ModelDescription, fields: Mapping[str, Any]) -> list[str]:
    """Lines about the model, the settings, and the model's defaults for everything else."""
    facts = [model.quantization or "", f"{model.context_per_request:,} tokens of context for a request", model.state]
    given = {key: value for key, value in fields.items() if key not in ("model", "progress", "separate_reasoning")}
    defaults = {key: value for key, value in model.sampling.items() if key not in given}
    return [
        f"model {model.name}: {', '.join(fact for fact in facts if fact)}",
        f"set: {_pairs(given) or 'nothing'}",
        *([f"otherwise: {_pairs(defaults)}"] if defaults else []),
    ]


def _pairs(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in fields.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."
