"""Chat messages to prompt text, with a Jinja template.

The template usually comes with the model file, from anywhere, so it is an untrusted program.  It runs in a child process
with Jinja's immutable sandbox (``template_worker.py``), a memory limit and a deadline.  The process takes about 25 MB;
the round trip adds 0.03 ms to a rendering.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from uma_trio.daemon.prompts.control_tokens import FINAL_CUT, ControlTokens, texts_of
from uma_trio.engine_link.messages import PromptPart
from uma_trio.errors import BadRequest, InternalError, ModelUnavailable
from uma_trio.processes.interpreter import PYTHON
from uma_trio.processes.sandbox import CannotStart, Interrupted, NoAnswer, Sandbox

LONE_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")

WORKER: Final = Path(__file__).with_name("template_worker.py")


class BrokenTemplate(InternalError):
    """The chat template does not compile, fails on good messages, or exceeds its limits.

    Not the client's fault.  Raw prompts still work.
    """


@attrs.frozen
class TemplateLimits:
    """What compiling a template, and each rendering, may cost."""

    source_chars: int = 1 << 17
    output_chars: int = 1 << 21
    memory_bytes: int = 1 << 29
    """Address space of the child process, the interpreter's 50 MB included.  Linux only."""
    seconds: float = 1.0
    """CPU time."""
    answer_seconds: float = 20.0
    """Longest wait for the answer: ``seconds`` on a busy machine."""


class ChatTemplate:
    """A compiled chat template in a child process of its own.

    The process lives as long as this object, or the daemon.  A process that dies is replaced at the next rendering.
    ``render`` may be called from several threads; renderings take turns.

    Args:
        source: the template, from ``tokenizer.chat_template`` of the model file.
        bos, eos: texts of these special tokens, ``""`` if the model has none.
        controls: the vocabulary's control tokens, for ``parts``.
        limits: bounds for compiling and for each rendering.
        now: the clock of ``strftime_now``.
        name: what errors call it.

    Raises:
        BrokenTemplate: the source does not compile or is too long.

    Blocks for about 50 ms, while the process starts.

    Source: the variables and functions of a template are those of ``apply_chat_template`` in Hugging Face's
    transformers.  Those of ``_defaults`` are set as in llama.cpp, so that a template that was made for it works here.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        controls: ControlTokens | None = None,
        limits: TemplateLimits = TemplateLimits(),
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        name: str = "the model's chat template",
    ) -> None:
        if len(source) > limits.source_chars:
            raise BrokenTemplate(f"{name} has {len(source)} characters, more than {limits.source_chars}")
        self._fixed = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._controls = controls or ControlTokens()
        self._now = now
        self._name = name
        setup = {"source": source, **attrs.asdict(limits)}
        # By path: this package's files do not shadow the child's imports.
        self._sandbox = Sandbox([*PYTHON, str(WORKER)], lambda: setup, limits.answer_seconds)
        try:
            with contextlib.suppress(Interrupted):  # it has been logged, and the first rendering starts another one
                self._sandbox.start()
        except CannotStart as error:
            raise self._does_not_start(error) from None

    def close(self) -> None:
        """End the worker.  The next chat would start another one."""
        self._sandbox.stop()

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = {},
        *,
        continue_final: bool = False,
        add_generation_prompt: bool = True,
    ) -> tuple[PromptPart, ...]:
        """The prompt text of a conversation, cut where a message or a tool spells a control token.

        Renders up to three times, each time with the full ``limits``.  See ``daemon.prompts.control_tokens``.

        Args:
            continue_final: end the text where the content of the last message ends, for an answer that continues it.
            add_generation_prompt: as in ``render``.

        Raises:
            BadRequest: as ``render``, or the template leaves out the last message.
            BrokenTemplate, ModelUnavailable: as ``render``.
        """
        render = (
            self._render_open if continue_final else partial(self.render, add_generation_prompt=add_generation_prompt)
        )
        if not tools:
            return self._controls.parts(messages, lambda given: render(given, variables=variables))
        offered = {"role": "tools", "content": tools}  # like a message that somebody has written
        return self._controls.parts(
            [*messages, offered], lambda given: render(given[:-1], given[-1]["content"], variables=variables)
        )

    def message_parts(self, text: str, variables: Mapping[str, Any] = {}) -> tuple[PromptPart, ...]:
        """What follows a message of the assistant: its end, a message of the user, and the beginning of the next answer.

        Raises:
            BadRequest, BrokenTemplate, ModelUnavailable: as ``render``, or the template leaves out a message.
        """

        def render(given: Sequence[Mapping[str, Any]]) -> str:
            question, answer, message = given
            marked = {**answer, "content": f"{answer['content']}{FINAL_CUT}"}
            _, cut, rest = self.render([question, marked, message], variables=variables).partition(FINAL_CUT)
            if not cut:
                raise BadRequest(f"{self._name} leaves out messages, so none can interrupt an answer", field="message")
            return rest

        chat = [("user", "."), ("assistant", "."), ("user", text)]
        return self._controls.parts([{"role": role, "content": content} for role, content in chat], render)

    def _render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """``render``, up to the end of the last message's content.  The template writes what comes before it."""
        *before, final = messages
        marked = {**final, "content": f"{final['content']}{FINAL_CUT}"}
        text, cut, _ = self.render(
            [*before, marked], tools, variables=variables, add_generation_prompt=False
        ).rpartition(FINAL_CUT)
        if not cut:
            raise BadRequest(
                f"{self._name} leaves out the last message, so no answer can continue it", field="messages"
            )
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        variables: Mapping[str, Any] = {},
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation.  Blocks for ``limits.answer_seconds`` at most, plus a restart.

        Args:
            messages: each with ``role``, a string, and ``content``, a string or ``None``.  Other keys are passed to the
                template; their values are plain.
            tools: in the form of the OpenAI API.
            variables: further variables, which a client has chosen.
            add_generation_prompt: end the text where the assistant's next message begins.

        Raises:
            BadRequest: the messages are malformed, or the template refuses them (for example because roles do not
                alternate) and says why, or it fails with ``variables``.
            BrokenTemplate: the template fails or exceeds its limits.
            ModelUnavailable: somebody has killed or stopped the process twice.
        """
        given = [_checked(index, message) for index, message in enumerate(messages)]
        fixed: dict[str, Any] = {"messages": given, "add_generation_prompt": add_generation_prompt, **self._fixed}
        if tools:
            fixed["tools"] = tools
        sent = (given, tools)
        now = self._now()
        try:
            all_variables = {**_defaults(now, tools), **variables, **fixed}
            answer = self._sandbox.ask({"now": now.isoformat(), "variables": all_variables})
        except CannotStart as error:
            raise self._does_not_start(error) from None
        except Interrupted as error:
            raise ModelUnavailable(f"{self._name} could not be rendered: {error}; send the request again") from None
        except NoAnswer as error:
            answer = {"error": str(error)}
        if "refused" in answer:
            reason = _without_new_surrogates(answer["refused"], sent)
            raise BadRequest(f"{self._name} refuses these messages: {reason}", field="messages")
        if "error" in answer:
            if variables:
                reason = _without_new_surrogates(answer["error"], sent)
                raise BadRequest(
                    f"{self._name} fails, perhaps for the chat_template_kwargs: {reason}", field="chat_template_kwargs"
                )
            raise BrokenTemplate(f"{self._name} failed: {_without_new_surrogates(answer['error'], sent)}")
        text: str = answer["text"]
        if _without_new_surrogates(text, sent) != text:
            raise BrokenTemplate(
                f"{self._name} failed: its output has half of a surrogate pair, which is not a character"
            )
        return text

    def _does_not_start(self, error: CannotStart) -> BrokenTemplate:
        return BrokenTemplate(f"{self._name} does not compile: {_without_new_surrogates(str(error))}")


def _defaults(now: datetime.datetime, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Variables that a client may set.  Other programs set them too, so templates use them without asking for them."""
    return {
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": json.dumps(tools, indent=4, ensure_ascii=False) if tools else "",
    }


def _without_new_surrogates(text: str, sent: object = ()) -> str:
    """Replace the lone surrogates that are not in ``sent``, messages and tools: those come from the template.

    Those in messages are masks of ``daemon.prompts.control_tokens``, which removes them.
    """
    if text.isascii() or LONE_SURROGATE.search(text) is None:
        return text
    masks = {mask for value in texts_of(sent) for mask in LONE_SURROGATE.findall(value)}
    return LONE_SURROGATE.sub(lambda match: match[0] if match[0] in masks else "\N{REPLACEMENT CHARACTER}", text)


def _checked(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{index}] must be an object with role and content", field=f"messages[{index}]")
    for key in ("role", "content"):
        if key not in message:
            raise BadRequest(f"messages[{index}] lacks {key}", field=f"messages[{index}].{key}")
        if not isinstance(message[key], str) and (key == "role" or "tool_calls" not in message):
            raise BadRequest(f"messages[{index}].{key} must be a string", field=f"messages[{index}].{key}")
    return dict(message)
