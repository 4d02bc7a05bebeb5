"""Chat messages to prompt text, with a Jinja template.

The template usually comes with the model file, from anywhere, so it is an untrusted program.  It runs in a child process
with Jinja's immutable sandbox (``template_worker.py``), a memory limit and a deadline.  The process takes about 25 MB;
the round trip adds 0.03 ms to a rendering.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from uma_trio.engine.messages import PromptPart
from uma_trio.errors import BadRequest, InternalError
from uma_trio.models.control_tokens import ControlTokens

WORKER: Final = Path(__file__).with_name("template_worker.py")

START_SECONDS: Final = 10.0
"""Longest wait for a new child, which imports Jinja and compiles the template: 50 ms on an idle machine.  The child's
CPU limit ends a template that never finishes compiling much sooner."""


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


class ChatTemplate:
    """A compiled chat template in a child process of its own.

    The process lives as long as this object, or the daemon.  A process that dies is replaced at the next rendering.
    ``render`` may be called from several threads; renderings take turns.

    Args:
        source: the template, from ``tokenizer.chat_template`` of the model file.
        bos, eos: texts of these special tokens, ``""`` if the model has none.
        controls: the vocabulary's control tokens, for ``parts``.
        limits: bounds for compiling and for each rendering.
        now: the clock behind ``strftime_now``.
        name: what errors call it.

    Raises:
        BrokenTemplate: the source does not compile or is too long.

    Blocks for about 50 ms, while the process starts.

    Source: the variables and functions of a template are those of ``apply_chat_template`` in Hugging Face's
    transformers.
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
        self._worker = _Worker(source, limits, name)
        weakref.finalize(self, self._worker.stop)
        self._worker.start()

    def parts(self, messages: Sequence[Mapping[str, str]]) -> tuple[PromptPart, ...]:
        """The prompt text of a conversation, cut where a message spells a control token.

        Renders up to three times, each time with the full ``limits``.  See ``models.control_tokens``.

        Raises:
            BadRequest, BrokenTemplate: as ``render``.
        """
        return self._controls.parts(messages, self.render)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.  Blocks for ``limits.seconds`` at most, plus a restart.

        Args:
            messages: each with ``role`` and ``content``, both strings.  Other keys with string values are passed to
                the template.
            add_generation_prompt: end the text where the assistant's next message begins.

        Raises:
            BadRequest: the messages are malformed, or the template refuses them (for example because roles do not
                alternate) and says why.
            BrokenTemplate: the template fails or exceeds its limits.
        """
        given = [_checked(index, message) for index, message in enumerate(messages)]
        variables = {"messages": given, "add_generation_prompt": add_generation_prompt, **self._fixed}
        return self._worker.render({"now": self._now().isoformat(), "variables": variables})


class _Worker:
    """The child process.  Starts it again after it died.  Requests from several threads take turns.

    Args:
        source: the template, compiled by each new process.
        name: what errors call it.
    """

    def __init__(self, source: str, limits: TemplateLimits, name: str) -> None:
        self._name = name
        self._setup = {"source": source, **attrs.asdict(limits)}
        self._seconds = limits.seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, request: Mapping[str, Any]) -> str:
        """Render with the variables in ``request``.

        Raises:
            BadRequest, BrokenTemplate: as ``ChatTemplate.render``.
        """
        with self._lock:
            self._ensure_started()
            answer = self._ask(request, self._seconds)
        if "refused" in answer:
            raise BadRequest(f"{self._name} refuses these messages: {answer['refused']}")
        if "error" in answer:
            raise BrokenTemplate(f"{self._name} failed: {answer['error']}")
        return answer["text"]

    def start(self) -> None:
        """Start the process and compile the template.

        Raises:
            BrokenTemplate: the template does not compile.
        """
        with self._lock:
            self._ensure_started()

    def stop(self) -> None:
        """Kill the process and wait for its end.  A no-op without a process."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes the pipes and waits
                process.kill()

    def _ensure_started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()  # closes the pipes of a process that something else has killed
        # By path, with -P: neither the current directory nor this package's files may shadow the child's imports.
        # In its own process group: Ctrl-C is for the daemon.  When the daemon ends, stdin closes and the child ends too.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:  # no memory, no file descriptors
            raise BrokenTemplate(f"the process that renders chat templates cannot start: {error}") from None
        answer = self._ask(self._setup, START_SECONDS)
        if "error" in answer:
            self.stop()
            raise BrokenTemplate(f"{self._name} does not compile: {answer['error']}")

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, str]:
        """Send one request and wait for its answer.  Stops a process that gives none in ``seconds``."""
        try:
            return self._exchange(request, seconds)
        except BaseException:
            self.stop()  # or the next request would read this one's answer
            raise

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        answer = b""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):  # the process died; read() will return b""
            while data:
                data = data[self._process.stdin.write(data) :]
        while not answer.endswith(b"\n"):
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.stop()
                return {"error": f"it takes longer than {seconds:g} s"}
            chunk = self._process.stdout.read(1 << 20)
            if not chunk:
                self.stop()
                return {"error": "its process died: it takes too much memory or time"}
            answer += chunk
        found: dict[str, str] = json.loads(answer.decode("utf-8", "surrogatepass"))
        return found


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
