"""A Jinja sandbox that charges for what it does.

Jinja's own sandbox forbids reaching Python's internals.  This one also bounds memory and time, by
``meter.py`` of this room.  Filters and methods are those that chat templates use; the rest is not there.
"""

# ruff: noqa: N802 - Jinja's code generator finds its methods by the names of the nodes

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox

from uma_trio.models.meter import LimitExceeded, Limits, Meter

MAX_INTEGER_BITS = 4096

_GREAT_WIDTH = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*([0-9]{3}|\*)")
"""A width or precision of three digits, or one that comes with the values."""


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes calls of the meter into the Python code that a template becomes."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        self.writeline("environment.charge()")  # an empty loop over a long list charges nothing else
        super().blockvisit(nodes, frame)

    def visit_Output(self, node: jinja2.nodes.Output, frame: jinja2.compiler.Frame) -> None:
        # Text between tags is not finalized; inside a macro it is collected before it is let out.
        data = sum(len(n.data) for n in node.nodes if isinstance(n, jinja2.nodes.TemplateData))
        self.writeline(f"environment.charge({data})", node)
        super().visit_Output(node, frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        self.write("(environment.charge(64) or ")  # "in" may search a long list
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self._call("joined", node.nodes, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self.write("list(")
        self._call("built", node.items, frame)
        self.write(")")

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        if node.ctx == "load":
            self._call("built", node.items, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.built(")
        super().visit_Dict(node, frame)
        self.write(")")

    def _call(self, method: str, items: list[jinja2.nodes.Expr], frame: jinja2.compiler.Frame) -> None:
        self.write(f"environment.{method}((")
        for item in items:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Everything a chat template may use.  Call ``start`` before compiling and before rendering.

    Whitespace is treated as transformers does (``trim_blocks``, ``lstrip_blocks``).
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _CodeGenerator

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing of the template runs while it is compiled
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=self._finalized,
        )
        self._meter = Meter()
        self.charge = self._meter.charge  # for the code that templates become
        self._now = now
        filters, tests = dict[str, Any](self.filters), dict[str, Any](self.tests)
        self.filters = {
            **{name: self._metered(filters[name]) for name in _FILTERS},
            "format": lambda value, *args, **named: self._formatted(value, named or args),
            "indent": self._indented,
            "join": self._join,
            "replace": self._replaced,
            "string": self._finalized,
            "tojson": self._tojson,
        }
        self.tests = {name: self._metered(test) for name, test in tests.items()}
        self.globals = {
            "range": jinja2.sandbox.safe_range,
            "dict": dict,
            "namespace": jinja2.utils.Namespace,
            "strftime_now": self._strftime_now,
        }

    def start(self, limits: Limits) -> None:
        """Bound what this thread does with this environment from now on."""
        self._meter.start(limits)

    # What the code generator, and Jinja itself, call.

    def built(self, value: Any) -> Any:
        """A list, tuple or dictionary as it was written in the template."""
        self._meter.charge_for(value)
        return value

    def joined(self, values: Iterable[object]) -> str:
        """``a ~ b``."""
        return "".join([self._finalized(value) for value in values])

    def _finalized(self, value: object) -> str:
        """A value as text, as in ``{{ value }}``."""
        if not isinstance(value, (str, int, float, list, tuple, dict, jinja2.Undefined, type(None))):
            raise LimitExceeded(f"it prints a {type(value).__name__}")
        self._meter.charge_for(value)
        return str(value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and operator == "%":
            return self._formatted(left, right)
        if operator == "*" and isinstance(right, int) and isinstance(left, (str, list, tuple)):
            self.charge(self._meter.size_of(left) * max(right, 0) + len(left))
        elif operator == "*" and isinstance(left, int) and isinstance(right, (str, list, tuple)):
            self.charge(self._meter.size_of(right) * max(left, 0) + len(right))
        elif isinstance(left, (str, list, tuple)):
            self._meter.charge_for(left)
            self._meter.charge_for(right)
        elif isinstance(left, int) and isinstance(right, int):
            self.charge(1)
            times = abs(right) if operator == "**" else 1
            if left.bit_length() * times + right.bit_length() > MAX_INTEGER_BITS:
                raise LimitExceeded("it makes huge numbers")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **named: Any) -> Any:
        self.charge()
        receiver = getattr(obj, "__self__", None)
        if isinstance(receiver, str) and obj.__name__ == "replace":
            return self._replaced(receiver, *args)  # these two take no arguments by name
        if isinstance(receiver, str) and obj.__name__ == "join":
            return self._join(args[0] if args else (), receiver)
        result = super().call(context, obj, *args, **named)
        if isinstance(result, (str, list, tuple, dict)):
            self._meter.charge_for(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        self.charge(len(found) if isinstance(argument, slice) and hasattr(found, "__len__") else 0)
        return found

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.charge()
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:
        """No ``str.format``: its widths are a way to make much out of little."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    # Filters and methods that make much out of little.

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def metered(*args: Any, **named: Any) -> Any:
            self.charge(64)
            result = function(*args, **named)
            if isinstance(result, (str, list, tuple, dict)):
                self._meter.charge_for(result)
            return result

        return metered

    def _join(self, values: Iterable[object], separator: object = "", attribute: Any = None) -> str:
        pick = jinja2.filters.make_attrgetter(self, attribute) if attribute is not None else None
        texts = []
        for value in values:
            texts.append(self._finalized(pick(value) if pick else value))
        separator = self._finalized(separator)
        self.charge(len(separator) * len(texts))
        return separator.join(texts)

    def _replaced(self, value: object, old: str, new: str, count: int | None = None) -> str:
        text, old, new = self._finalized(value), str(old), str(new)
        self.charge((text.count(old) if count is None or count < 0 else count) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _formatted(self, text: str, values: Any) -> str:
        if _GREAT_WIDTH.search(text):
            raise LimitExceeded("it formats to a great width")
        self.charge(text.count("%") * (100 + self._meter.size_of(values)) + len(text))
        formatted: str = text % values
        return formatted

    def _indented(self, value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self._finalized(value)
        self.charge((text.count("\n") + 1) * (len(width) if isinstance(width, str) else max(width, 0)))
        return jinja2.filters.do_indent(text, width, first, blank)

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if isinstance(indent, int) and not 0 <= indent <= 16:
            raise LimitExceeded("it indents JSON by more than 16")
        self._meter.charge_for(value)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self.charge(len(text))
        return text

    def _strftime_now(self, layout: str) -> str:
        if len(layout) > 100 or re.search(r"[0-9]{3}", layout):
            raise LimitExceeded("it asks for a strange date")
        return self._now().strftime(layout)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's own text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


_FILTERS = """
    abs capitalize count d default dictsort e escape first float int items last length list lower map max
    min reject rejectattr reverse round safe select selectattr sort title trim unique upper wordcount
""".split()  # noqa: SIM905

_STRING_METHODS = """
    capitalize count endswith find index isalnum isalpha isdigit islower isnumeric isspace isupper join
    lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
""".split()  # noqa: SIM905

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS),
    list: frozenset(["count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["get", "items", "keys", "values"]),
    int: frozenset(),
    float: frozenset(),
}
