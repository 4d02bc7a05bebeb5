"""Child process that renders one chat template.  Started by ``chat.py``; imports nothing of uma_trio.

A template is a program, usually from the model file.  Jinja's sandbox keeps it away from Python, but does not bound memory or
time.  The operating system does: this process has limits for address space and CPU time, and the parent kills it when
it misses its deadline.

Protocol: one JSON object per line.  The first line on stdin has the template's ``source`` and the limits; every
later line has the variables of one rendering.  Each gets one line on stdout: ``{"text": ...}``, ``{"refused": ...}``
when the template calls ``raise_exception``, or ``{"error": ...}``.  The process ends with its stdin.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import sys
import traceback
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


class Refused(Exception):
    """The template called ``raise_exception``."""


class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training.  It has no effect on rendering."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def raise_exception(message: object = "") -> None:
    raise Refused(str(message)[:500])


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """A compiled template with the variables and functions of transformers' ``apply_chat_template``."""

    def __init__(self, source: str, output_chars: int) -> None:
        self._output_chars = output_chars
        self._now = datetime.datetime.min
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
        )
        environment.filters["tojson"] = tojson
        del environment.globals["lipsum"]  # it is random
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda layout: self._now.strftime(layout)
        self._template = environment.from_string(source)

    def render(self, now: str, variables: dict[str, Any]) -> str:
        """
        Args:
            now: what ``strftime_now`` formats, in ISO 8601.
        """
        self._now = datetime.datetime.fromisoformat(now)
        chunks, left = [], self._output_chars
        for chunk in self._template.generate(variables):
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"more than {self._output_chars} characters of output")
            chunks.append(chunk)
        return "".join(chunks)


def main() -> None:
    lines = map(json.loads, sys.stdin.buffer)
    setup = next(lines)
    limit_memory(setup["memory_bytes"])
    limit_cpu(setup["seconds"])
    try:
        renderer = Renderer(setup["source"], setup["output_chars"])
    except Exception as error:  # noqa: BLE001 - a template can make Python raise anything
        send({"error": described(error)})
        return
    send({"text": ""})
    for request in lines:
        limit_cpu(setup["seconds"])
        try:
            answer = {"text": renderer.render(**request)}
        except Refused as refused:
            answer = {"refused": str(refused)}
        except Exception as error:  # noqa: BLE001 - as above
            answer = {"error": described(error)}
        send(answer)


def limit_memory(n_bytes: int) -> None:
    """Limit the address space.  macOS does not enforce this; there, only the deadline bounds memory."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def limit_cpu(seconds: float) -> None:
    """End this process, by SIGPROF, after so much more of CPU time, also if the parent is gone."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def send(answer: dict[str, str]) -> None:
    # Without \uXXXX escapes: two lone surrogates in a row would be decoded to one character.
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    sys.stdout.buffer.flush()


def described(error: Exception) -> str:
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    where = f" (line {line})" if isinstance(line, int) else ""
    return f"{str(error)[:500] or type(error).__name__}{where}"


if __name__ == "__main__":
    main()
