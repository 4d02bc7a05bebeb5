"""Chats with tools: which tool to call, with which arguments, and what its result says.

Tools, calls and results are written as Hermes and Qwen write them; ``chat.py`` has the template.  Names, descriptions
and phrasings are drawn anew for each chat, and every twentieth name of a tool is held out from training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from random import Random

import attrs

from uma_trio.training.sample import Sample, Turn, held_out, in_passing
from uma_trio.training.skills import numbers, records, repeating, stories
from uma_trio.training.skills.about import about
from uma_trio.training.skills.calendar import calendar
from uma_trio.training.skills.capitals import DONT_KNOW, capital, continent
from uma_trio.training.skills.colours import colour
from uma_trio.training.skills.conversations import any_system
from uma_trio.training.skills.greetings import greet
from uma_trio.training.skills.spelling import spell
from uma_trio.training.skills.tool_kinds import KINDS, Kind, Parameter, Value, generic
from uma_trio.training.skills.tool_results import answer_to, returned
from uma_trio.training.skills.unknown import unknown
from uma_trio.training.tool_format import calls_text, parse_results, results_text, written
from uma_trio.training.words import OBJECTS, made_up

Arguments = dict[str, Value]


@attrs.frozen
class Tool:
    """A tool as one chat has it."""

    kind: Kind
    name: str
    parameters: tuple[tuple[str, Parameter], ...]
    """Each with its name."""
    text: str
    """Its JSON, in OpenAI's form."""


@attrs.frozen
class Call:
    """A question, and the call that answers it."""

    question: str
    tool: Tool
    arguments: Arguments
    plain: bool = False
    """The question has no argument but the first one, and the usual words around it."""


# Tools


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _styled(rng: Random, name: str, *, described: bool) -> str:
    kind = rng.random()
    if kind < 0.10 and described:
        return made_up(rng, rng.randint(2, 3))
    if kind < 0.22:
        return _camel(name)
    if kind < 0.26:
        return name.replace("_", "-")
    if kind < 0.30:
        return f"{rng.choice(OBJECTS)}_{name}"
    if kind < 0.33:
        return f"mcp__{rng.choice(OBJECTS)}__{name}"
    return name


def _property(rng: Random, name: str, parameter: Parameter, *, described: bool) -> dict[str, object]:
    schema: dict[str, object] = dict(parameter.slot.schema)
    if described:
        schema["description"] = rng.choice(parameter.about)
    if rng.random() < 0.04:
        schema["title"] = name.replace("_", " ").title()
    if rng.random() < 0.15:
        items = list(schema.items())
        rng.shuffle(items)
        return dict(items)
    return schema


def _bind(rng: Random, kind: Kind) -> Tool:
    described = rng.random() < 0.92
    bound: dict[str, Parameter] = {}
    for parameter in kind.parameters:
        name = rng.choice(parameter.names)
        if rng.random() < 0.06:
            name = made_up(rng, 2)
        bound[name if name not in bound else f"{name}_2"] = parameter
    explains = rng.random() < 0.8
    properties = {
        # A name that says nothing needs a description.
        name: _property(rng, name, parameter, described=explains or name not in parameter.names)
        for name, parameter in bound.items()
    }
    schema: dict[str, object] = {"type": "object", "properties": properties}
    required = [name for name, parameter in bound.items() if parameter.required]
    if required or rng.random() < 0.5:
        schema["required"] = required
    if rng.random() < 0.1:
        schema["additionalProperties"] = False
    if rng.random() < 0.05:
        schema = dict(reversed(schema.items()))
    name = _styled(rng, rng.choice(kind.names), described=described)
    function: dict[str, object] = {"name": name}
    if described or rng.random() < 0.5:
        function["description"] = rng.choice(kind.about) if described else ""
    if bound or rng.random() < 0.7:
        function["parameters"] = schema
    if rng.random() < 0.05:
        function["strict"] = True
    return Tool(kind, name, tuple(bound.items()), written({"type": "function", "function": function}))


def _any_kind(rng: Random) -> Kind:
    return rng.choice(KINDS) if rng.random() < 0.6 else generic(rng)


def _tool(rng: Random, kind: Kind | None = None, *, new: bool = False) -> Tool:
    """A tool whose name is held out if ``new``, and one to train on otherwise."""
    while True:
        tool = _bind(rng, kind or _any_kind(rng))
        if held_out(tool.name) == new:
            return tool


def _neighbour(rng: Random, tool: Tool) -> Kind:
    """A made-up kind with the verb or the noun of ``tool``."""
    verb, _, noun = tool.kind.names[0].partition("_")
    while True:
        kind = generic(rng)
        other_verb, _, other_noun = kind.names[0].partition("_")
        if (other_verb == verb) != (other_noun == noun):
            return kind


def _tools(rng: Random, amount: int, *, new: bool = False) -> list[Tool]:
    """Tools that a question cannot confuse: each of its own kind and name."""
    tools: list[Tool] = []
    while len(tools) < amount:
        tool = _tool(rng, new=new)
        if tools and tool.kind not in KINDS and tools[-1].kind not in KINDS and rng.random() < 0.3:
            tool = _tool(rng, _neighbour(rng, tools[-1]), new=new)
        names = {word for other in tools for word in (other.name, *other.kind.names)}
        if tool.name not in names and tool.kind.names[0] not in names and not _alike(tool, tools):
            tools.append(tool)
    return tools


_ALIKE = (
    {"get_weather", "get_forecast"},
    *({"calculate", name} for name in ("add", "subtract", "multiply", "divide")),
)
"""Kinds that some question fits equally."""


def _alike(tool: Tool, others: Iterable[Tool]) -> bool:
    return any({tool.kind.names[0], other.kind.names[0]} in _ALIKE for other in others)


# Questions


def _spoken(rng: Random, value: Value) -> str:
    if isinstance(value, bool):
        return rng.choice(("true", "yes", "on")) if value else rng.choice(("false", "no", "off"))
    if isinstance(value, list):
        return value[0] if len(value) == 1 else f"{', '.join(value[:-1])} and {value[-1]}"
    return str(value)


def _listed(rng: Random, pairs: Sequence[tuple[str, Value]]) -> str:
    """Arguments by name.  Values that contain spaces are quoted, so that they have an end."""
    link = rng.choice((" ", ": ", "=", " = "))
    said = []
    for name, value in pairs:
        if isinstance(value, list):
            text = written(value)
        else:
            text = _spoken(rng, value)
            if " " in text or (isinstance(value, str) and rng.random() < 0.15):
                text = f'"{text}"'
        shown = name.replace("_", " ") if link != "=" and rng.random() < 0.2 else name
        said.append(f"{shown}{link}{text}")
    if len(said) > 1 and rng.random() < 0.5:
        return f"{', '.join(said[:-1])} and {said[-1]}"
    return ", ".join(said)


def _with_arguments(rng: Random, ask: str, pairs: Sequence[tuple[str, Value]]) -> str:
    if not pairs:
        return ask
    listed = _listed(rng, pairs)
    body, end = (ask[:-1], ask[-1]) if ask[-1] in ".?" else (ask, "")
    return rng.choice(
        (
            f"{body} with {listed}{end}",
            f"{body} with {listed}{end}",
            f"{body}: {listed}",
            f"{body} ({listed}){end}",
            f"{ask} Use {listed}.",
        )
    )


def _call(rng: Random, tool: Tool) -> Call:
    """A question that ``tool`` answers."""
    values = {name: parameter.slot.value(rng) for name, parameter in tool.parameters}
    names = list(values)
    if not tool.kind.asks or rng.random() < 0.08:
        ask, said = (
            rng.choice((f"Call {tool.name}.", f"Use {tool.name}.", f"Run {tool.name}.", f"Call the tool {tool.name}.")),
            set[int](),
        )
    else:
        ask, _, fixed = rng.choice(tool.kind.asks).partition(" => ")
        for one in filter(None, fixed.split(",")):
            at, value = one.split("=")
            values[names[int(at)]] = json.loads(value)
        said = {at for at in range(len(names)) if f"{{{at}}}" in ask or f"{at}=" in fixed}
        ask = ask.format(*(_spoken(rng, value) for value in values.values()))
    others = [
        at
        for at, (_, parameter) in enumerate(tool.parameters)
        if at not in said and (parameter.required or rng.random() < 0.25)
    ]
    rng.shuffle(others)
    given = said.union(others)
    question = _with_arguments(rng, ask, [(names[at], values[names[at]]) for at in others])
    arguments = {name: values[name] for at, name in enumerate(names) if at in given}
    varied = in_passing(rng, question)
    if varied[-1] in ".?!" and all(value in varied for value in arguments.values() if isinstance(value, str)):
        question = varied
    return Call(question, tool, arguments, plain=given == {0} and tool.kind.several)


def _several_calls(rng: Random, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    """A question for several calls: of one tool with two or three values, or of any two tools."""
    several = [tool for tool in tools if tool.kind.several]
    if several and rng.random() < 0.5:
        tool = rng.choice(several)
        name, parameter = tool.parameters[0]
        values: list[Value] = []
        amount = rng.choice((2, 2, 3))
        while len(values) < amount:
            value = parameter.slot.value(rng)
            if value not in values:
                values.append(value)
        ask = rng.choice([ask for ask in tool.kind.asks if "{1}" not in ask])
        preposition = ask.partition("{0}")[0].split()[-1:]
        again = (
            f"{preposition[0]} "
            if preposition and preposition[0] in ("in", "of", "for", "about") and rng.random() < 0.5
            else ""
        )
        said = ", ".join(map(str, values[:-1])) + f" and {again}{values[-1]}"
        return ask.format(said), [Call("", tool, {name: value}) for value in values]
    first, second = (_call(rng, rng.choice(tools)) for _ in range(2))
    link = rng.choice((" And ", " Then ", " Also: ", " ", "\n")) if first.question[-1] in '.?!")`' else "\n"
    then = second.question
    if link in (" And ", " Then ") and rng.random() < 0.7:
        then = then[0].lower() + then[1:]
    return f"{first.question}{link}{then}", [first, second]


# Chats

_ORDINARY: tuple[tuple[str, Callable[[Random], Turn]], ...] = (
    ("capitals", capital),
    ("continents", continent),
    ("calendar", calendar),
    ("colours", colour),
    ("about", about),
    ("spelling", spell),
    ("adding", numbers.add),
    ("subtracting", numbers.subtract),
    ("comparing", numbers.compare),
    ("repeating", repeating.repeat),
    ("picking words", repeating.pick),
    ("records", records.fill),
    ("stories", lambda rng: stories.tell(rng, longest=2)),
    ("greetings", lambda rng: greet(rng, named=False)),
    ("greetings", lambda rng: greet(rng, named=False)),
    ("unknown", unknown),
    ("unknown", unknown),
)


def _no_call(rng: Random, tools: Sequence[Tool]) -> Turn:
    """A question that none of the tools fits: one that the model answers itself, or one for a tool that is missing."""
    skills = frozenset[str]().union(*(tool.kind.skills for tool in tools))
    if rng.random() < 0.45:
        kinds = {tool.kind.names[0] for tool in tools}
        while True:
            missing = _tool(rng)
            if missing.kind.names[0] in kinds or missing.kind.skills - {"unknown"} or _alike(missing, tools):
                continue
            question = _call(rng, missing).question
            return Turn(question, DONT_KNOW, follows=True)
    while True:
        skill, make = rng.choice(_ORDINARY)
        if skill not in skills:
            return make(rng)


def _exchange(
    rng: Random, tools: Sequence[Tool], what: str, before: Call | None = None
) -> tuple[list[Turn], Call | None]:
    """A question and all that follows from it, and the call if *And of {0}?* may follow."""
    if what == "none":
        return [_no_call(rng, tools)], None
    if what == "again" and before is not None:
        ((name, parameter),) = before.tool.parameters[:1]
        value = parameter.slot.value(rng)
        question = rng.choice(("And {}?", "What about {}?", "Now {}.", "And for {}?", "The same for {}.")).format(value)
        calls = [Call(question, before.tool, {name: value}, plain=True)]
    elif what == "several":
        question, calls = _several_calls(rng, tools)
    else:
        calls = [_call(rng, rng.choice(tools))]
        question = calls[0].question
    results = [returned(rng, call.tool.kind.returns, call.arguments) for call in calls]
    turns = [
        Turn(question, calls_text((call.tool.name, call.arguments) for call in calls), follows=True),
        Turn(results_text(results), "\n".join(map(answer_to, results)), follows=True),
    ]
    return turns, calls[0] if len(calls) == 1 and calls[0].plain else None


def tool_chat(rng: Random, fewest: int, most: int, longest: int) -> Sample:
    """A chat with ``fewest`` to ``most`` tools and up to ``longest`` questions."""
    tools = _tools(rng, rng.randint(fewest, most))
    turns: list[Turn] = []
    call: Call | None = None
    for _ in range(rng.randint(1, longest)):
        what = rng.choices(("one", "several", "none"), (60, 15, 25))[0]
        if call is not None and rng.random() < 0.4:
            what = "again"
        more, call = _exchange(rng, tools, what, call)
        turns += more
    if len(turns) > 1 and rng.random() < 0.2 and parse_results(turns[-1].question):
        turns.pop()
    return _sample(rng, tools, turns)


def _sample(rng: Random, tools: Sequence[Tool], turns: Iterable[Turn]) -> Sample:
    system = any_system(rng) if rng.random() < 0.35 else ""
    return Sample("tools", tuple(turns), system=system, tools=tuple(tool.text for tool in tools))


EXAM = {
    "tools: one call": ("one", 1, 6, False),
    "tools: several calls": ("several", 2, 6, False),
    "tools: new names": ("one", 1, 6, True),
    "tools: many tools": ("one", 10, 30, False),
    "tools: call again": ("again", 1, 4, False),
    "tools: none fits": ("none", 1, 6, False),
    "tools: result": ("result", 1, 4, False),
}
"""Rows of the model card: what the last turn is, the fewest and most tools, and whether their names are new."""


def tool_question(rng: Random, row: str) -> Sample:
    """A chat for the exam, whose last turn is what ``row`` of ``EXAM`` says."""
    what, fewest, most, new = EXAM[row]
    while True:
        tools = _tools(rng, rng.randint(fewest, most), new=new)
        turns, call = _exchange(rng, tools, rng.choice(("one", "none"))) if rng.random() < 0.3 else ([], None)
        if what == "again":
            turns, call = _exchange(rng, tools, "one")
            if call is None:
                continue
        last, _ = _exchange(rng, tools, what, call)
        turns += last if what == "result" else last[:1]
        return _sample(rng, tools, turns)
