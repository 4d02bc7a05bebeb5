"""Messages to prompt text, by the model's own Jinja template.

The template comes with the model file, and the file from anywhere: it is a program of a stranger's.
Jinja's immutable sandbox keeps it away from Python.  What the sandbox does not do is bound what a
template costs, so every step that takes memory or time is charged to a meter first: ``sandbox.py``
and ``meter.py`` of this room.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence

import jinja2

from uma_trio.engine.records import Part
from uma_trio.errors import BadRequest, InternalError
from uma_trio.models.controls import Controls
from uma_trio.models.meter import LimitExceeded, Limits
from uma_trio.models.sandbox import MeteredEnvironment


class BrokenTemplate(InternalError):
    """The model's chat template does not compile, fails on good messages, or costs too much.

    Not the client's fault: raw prompts are served all the same.
    """


class _Refused(Exception):
    """The template called ``raise_exception``."""


def _refuse(message: object = "") -> None:
    raise _Refused(str(message)[:500])


class ChatTemplate:
    """A compiled chat template.  Compile once; ``render`` may run in several threads at a time.

    Args:
        source: the template, as in the file's ``tokenizer.chat_template``.
        bos, eos: texts of these special tokens, ``""`` if the model has none.
        controls: the vocabulary's control tokens, for ``parts``.
        limits: what one rendering may cost.
        now: the clock behind ``strftime_now``.

    Raises:
        BrokenTemplate: the source does not compile or is too long.

    Source: the variables and functions that templates are written for are those of
    ``apply_chat_template`` in Hugging Face's transformers.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        controls: Controls | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._limits = limits
        self._controls = controls or Controls()
        if len(source) > limits.source_chars:
            raise BrokenTemplate(
                f"the model's chat template has {len(source)} characters, more than {limits.source_chars}"
            )
        self._environment = MeteredEnvironment(now)
        self._environment.globals["raise_exception"] = _refuse
        self._fixed = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._environment.start(limits)
        try:
            self._template = self._environment.from_string(source)
        except _FAULTS as error:
            raise BrokenTemplate(f"the model's chat template does not compile: {_said(error)}") from error

    def parts(self, messages: Sequence[Mapping[str, str]]) -> tuple[Part, ...]:
        """The prompt text of a conversation, as ``render`` has it, cut where a message spells a control token.

        Renders up to three times; each time has ``limits`` of its own.  See ``models.controls``.

        Raises:
            BadRequest, BrokenTemplate: as ``render``.
        """
        return self._controls.parts(messages, self.render)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Args:
            messages: each with ``role`` and ``content``, both strings; other keys with string values
                are handed on to the template.
            add_generation_prompt: whether the text ends where the assistant's next message begins.

        Raises:
            BadRequest: the messages are not of this form, or the template refuses them (say, because
                roles do not alternate) and tells why.
            BrokenTemplate: the template fails or goes beyond its limits.
        """
        given = [_checked(index, message) for index, message in enumerate(messages)]
        pieces: list[str] = []
        left = self._limits.output_chars
        self._environment.start(self._limits)
        try:
            for piece in self._template.generate(
                messages=given, add_generation_prompt=add_generation_prompt, **self._fixed
            ):
                left -= len(piece)
                if left < 0:
                    raise LimitExceeded(f"more than {self._limits.output_chars} characters of output")
                pieces.append(piece)
        except _Refused as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from None
        except _FAULTS as error:
            raise BrokenTemplate(f"the model's chat template failed: {_said(error)}") from error
        return "".join(pieces)


_FAULTS = (
    jinja2.TemplateError,
    LimitExceeded,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the Python code that a template becomes
    TypeError,
    ValueError,
)
"""What a template can make Python raise; anything else is a defect of ours and goes through."""


def _said(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if isinstance(line, int) else ""
    return f"{str(error)[:500] or type(error).__name__}{where}"


def _checked(index: int, message: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{index}] must be an object with role and content")
    for key in ("role", "content"):
        if key not in message:
            raise BadRequest(f"messages[{index}] lacks {key}")
    for key, value in message.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise BadRequest(f"messages[{index}].{key} must be a string")
    return dict(message)
