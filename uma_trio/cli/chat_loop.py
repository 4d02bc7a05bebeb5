"""The loop of ``uma-trio chat``: read a message or a command, show the answer."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import trio

from uma_trio.cli.answer import print_stats, printable, warn_if_cut, warn_if_in_memory
from uma_trio.cli.answer_view import FRAME_S, AnswerView, MarkdownView, PlainView
from uma_trio.cli.chat_input import Input, LineInput, TerminalInput
from uma_trio.cli.chat_settings import BadSetting, settings_text, with_setting
from uma_trio.cli.client_options import HINTS, say_which_daemon
from uma_trio.cli.content import Kind, dropped_file, media_part
from uma_trio.cli.conversation import Conversation, Message, as_fields, as_json, as_markdown
from uma_trio.cli.generation import asked, generate, new_id
from uma_trio.cli.keyboard import hidden_keys
from uma_trio.cli.progress import load_with_progress
from uma_trio.cli.run_trio import run
from uma_trio.cli.shown_answer import ShownAnswer
from uma_trio.cli.stdio import note
from uma_trio.cli.type_ahead import CHANGES, change_of
from uma_trio.client import (
    Client,
    ClientError,
    Eos,
    ModelDescription,
    NoDaemon,
    ServerError,
)
from uma_trio.files import read_text, replace_text
from uma_trio.protocol.parameters import MAX_SEED

COMMANDS: Final = {
    "/new": ("", "begin another conversation; a session stays with the daemon"),
    "/session": ("NAME", "continue or begin a session, which the daemon remembers"),
    "/model": ("[NAME]", "go on with another model; without NAME, list them"),
    "/system": ("TEXT", "set the system message; without TEXT, show it"),
    "/image": ("[FILE]", "send a picture with the next message, as does its path alone; without FILE, none"),
    "/audio": ("[FILE]", "send a file of sound with the next message; without FILE, none"),
    "/set": (
        "NAME VALUE",
        "set an option of uma-trio chat, such as temperature 0.8 or json-schema FILE; off unsets it",
    ),
    "/show": ("", "show the model, and what is set"),
    "/retry": ("[TEMPERATURE [SEED]]", "ask the last question again"),
    "/edit": ("[answer]", "edit the last question and ask it; or the last answer, which the conversation then has"),
    "/continue": ("", "go on with the last answer, such as one that was cut"),
    "/save": ("FILE", "write the conversation to FILE.md or FILE.json"),
    "/stats": ("", "show tokens and timings of the last answer"),
    "/help": ("", "list the commands"),
    "/bye": ("", "end the program; also /quit, /exit and Ctrl-D"),
    **{name: (argument, f"while it answers: {meaning}") for name, (argument, meaning) in CHANGES.items()},
}
"""What follows each command, and what it does."""

LEAVING: Final = ("/quit", "/exit", "/q")
"""Other spellings of ``/bye``."""

OF_OTHER_PROGRAMS: Final = {
    **dict.fromkeys(("/clear", "/reset"), "/new"),
    **dict.fromkeys(("/regen", "/again"), "/retry"),
    "/load": "/session",
    "/?": "/help",
}
"""What stands here for the commands that users know from other programs, such as Ollama and llama.cpp."""

CHAT_HINTS: Final = {
    **HINTS,
    "E_LIMIT_CONTEXT": "the conversation and the answer no longer fit the context: /new begins another conversation; "
    "with a smaller /set max_tokens the answer needs less room, and with /set n_keep the oldest messages are dropped",
    "E_LIMIT_MAX_TOKENS": "give /set max_tokens a smaller number, or serve with a larger one",
    "E_LIMIT_PROMPT_TOO_LARGE": "the conversation has become too long for this daemon: /new begins another one",
}

T = TypeVar("T")

RETRY_TEMPERATURE: Final = 0.8
"""What the first /retry has where answers are greedy; llama-server's and Ollama's default."""
RETRY_STEP: Final = 0.4
"""How much each further /retry adds, since the ones before did not please."""
HIGHEST_RETRY_TEMPERATURE: Final = 2.0


class Quit(Exception):
    """The user wants to leave."""


class Chat:
    """One conversation after the other.

    Args:
        fields: what every request has.
        session: continue or begin this one.
        plain: no Markdown.
        show_reasoning: print that of the model; ``None``: on a terminal.
    """

    def __init__(
        self,
        *,
        fields: dict[str, Any],
        session: str | None,
        system: str | None,
        socket: str | None,
        plain: bool,
        show_reasoning: bool | None,
    ) -> None:
        self._fields = {**fields, "separate_reasoning": True, "progress": sys.stderr.isatty()}
        self._show_reasoning = show_reasoning
        self._socket = socket
        self._renders = sys.stdout.isatty() and not plain
        self._is_terminal = sys.stdin.isatty()
        self._input: Input = TerminalInput([*COMMANDS]) if self._is_terminal else LineInput()
        self._conversation = Conversation(session, system)
        self._unanswered: str | None = None
        """The last message, if it is not part of the conversation: it failed, or was cancelled before its answer."""
        self._n_retries = 0
        self._last: Eos | None = None
        self._restarts = 0
        """Restarts of the engine that are known of."""
        self._is_greedy = False
        """Whether nothing is drawn at random unless a request says so."""
        self._saved: dict[Path, str] = {}
        """Files of this conversation, and what was written into them."""

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Chat until the user leaves.

        Raises:
            ClientError: there is no daemon at the start; or any error, if stdin is not a terminal.
            KeyboardInterrupt: Ctrl-C, except on a terminal where it cancels an answer or empties the prompt.
        """
        with contextlib.suppress(EOFError, Quit), hidden_keys():
            self._greet()
            while True:
                self._next()

    def _next(self) -> None:
        """Read a message or a command, and do what it asks for."""
        try:
            text = self._input.read().strip()
        except KeyboardInterrupt as interrupt:
            if not self._is_terminal:
                raise
            if not interrupt.args[0]:
                note("to leave, type /bye or press Ctrl-D")
            return
        if (dropped := dropped_file(text)) is not None:
            self._attach(*dropped)
        elif text.startswith("//"):
            self._ask(text[1:])
        elif text.startswith("/"):
            self._command(text)
        elif text:
            self._n_retries = 0
            self._ask(text)

    def _greet(self) -> None:
        run(say_which_daemon, "chat", self._socket, None)
        snapshot = self._metrics()
        self._restarts = _restarts(snapshot)
        if self._is_terminal:
            note(f"{self._fields.get('model') or snapshot['model']}; /help lists the commands")
        if self._conversation.session is not None:
            self._open_session(self._conversation.session)

    # -- commands -------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        if (problem := _problem(text)) is not None:
            note(problem)
            return
        name, _, argument = text.partition(" ")
        name = "/bye" if name in LEAVING else name
        handlers: dict[str, Callable[[str], None]] = {
            "/new": self._new,
            "/session": self._session,
            "/model": self._model,
            "/system": self._system,
            "/image": partial(self._attach, "image"),
            "/audio": partial(self._attach, "audio"),
            "/set": self._set,
            "/show": self._show,
            "/edit": self._edit,
            "/retry": self._retry,
            "/continue": self._continue,
            "/save": self._save,
            "/stats": self._stats,
            "/help": self._help,
            "/bye": self._quit,
            **dict.fromkeys(CHANGES, self._too_late),
        }
        handlers[name](argument.strip())

    def _new(self, _: str) -> None:
        self._begin(Conversation(system=self._conversation.system))
        note("a new conversation")

    def _begin(self, conversation: Conversation) -> None:
        self._conversation, self._unanswered, self._last = conversation, None, None
        self._is_greedy = False
        self._saved.clear()

    def _session(self, name: str) -> None:
        if name:
            self._begin(Conversation(name, self._conversation.system))
            try:
                self._open_session(name)
            except ClientError as error:
                self._fail(error)
        elif self._conversation.session is None:
            note("this conversation is in no session: it ends with the program")
        else:
            note(f"this is the session {printable(self._conversation.session)}")

    def _open_session(self, name: str) -> None:
        """Load what the daemon knows of a session, and show its last turn."""
        try:
            transcript = self._query(lambda client: client.transcript(name, model=self._fields.get("model")))
        except ServerError as error:
            if error.code != "E_SESSION_NOT_FOUND":
                raise
            note(f"a new session {printable(name)}")
            return
        info = transcript.session
        turns = "1 turn" if info.turns == 1 else f"{info.turns:,} turns"
        note(f"session {printable(name)}: {turns}, {info.tokens:,} tokens")
        if transcript.text is not None:
            note("it continues plain prompts, so it cannot continue a chat: begin another one")
        messages = [as_fields(message) for message in transcript.messages]
        self._conversation.messages = messages
        if self._is_terminal and self._conversation.last_question is not None:
            note("> " + printable(self._conversation.last_question))
            view = self._view()
            view.feed(messages[-1]["content"])
            view.finish()
            click.echo(err=True)

    def _system(self, text: str) -> None:
        conversation = self._conversation
        if not text:
            known = [message["content"] for message in conversation.transcript() if message["role"] == "system"]
            note(printable(known[0]) if known else "there is no system message")
        elif conversation.is_fixed:
            note("this session has begun, so its system message stays: begin another conversation with /new first")
        else:
            conversation.system = text
            note("the system message applies from the next message")

    def _model(self, name: str) -> None:
        try:
            if not name:
                current = self._description().name
                for model in self._query(lambda client: client.models()):
                    if "completion" in model.capabilities:
                        note(f"{'*' if model.name == current else ' '} {model.name}  {model.state}")
                return
            if self._conversation.session is not None:
                note("a session stays with its model: begin another conversation with /new first")
                return
            loaded = run(load_with_progress, name, self._socket)
        except ClientError as error:
            self._fail(error)
        except KeyboardInterrupt:
            note("the model is as before")
        else:
            self._fields["model"] = name
            note(f"{loaded.name} answers from now on")

    def _attach(self, kind: Kind, name: str) -> None:
        files = self._conversation.files
        if not name:
            files[:] = [file for file in files if file["type"] != kind]
            note(f"no {'picture' if kind == 'image' else 'sound'} goes with the next message")
            return
        try:
            files.append(media_part(Path(name), kind))
        except click.UsageError as error:
            note(error.message)
        else:
            note(f"{printable(name)} goes with the next message")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            self._show("")
        elif name == "system":
            self._system(value.strip())
        else:
            try:
                self._fields = with_setting(self._fields, name, value.strip())
                self._is_greedy = False  # with these settings that is not known
            except BadSetting as error:
                note(str(error))

    def _show(self, _: str) -> None:
        try:
            description = self._description()
        except ClientError as error:
            self._fail(error)
            return
        for line in settings_text(description, self._fields):
            note(printable(line))
        if self._conversation.session is not None:
            note(f"session: {printable(self._conversation.session)}")
        self._system("")

    def _edit(self, what: str) -> None:
        is_answer = what == "answer"
        if what and not is_answer:
            note("/edit edits the last question, and /edit answer the last answer")
            return
        answer, question = self._conversation.last_answer, self._unanswered or self._conversation.last_question
        before = answer if is_answer and self._unanswered is None else None if is_answer else question
        if not before:
            note(f"there is no {'answer' if is_answer else 'question'} to edit")
            return
        try:
            text = self._input.edit(before).strip()
        except (KeyboardInterrupt, EOFError):
            note("nothing was changed")
            return
        if is_answer and text:
            self._conversation.edit_answer(text)
            note("the conversation goes on from this answer")
        elif text:
            self._n_retries = 0
            self._ask(text, retry=self._unanswered is None)

    def _retry(self, argument: str) -> None:
        question = self._unanswered or self._conversation.last_question
        more: dict[str, Any] = {}
        try:
            for name, value in zip(("temperature", "seed"), argument.split(), strict=False):
                more |= {key: setting for key, setting in with_setting({}, name, value).items() if key == name}
        except BadSetting as error:
            note(f"{error}; try /retry 0.8, or with a seed /retry 0.8 7")
            return
        if question is None:
            note("there is no question to ask again")
            return
        self._n_retries += 1
        seed = self._fields.get("seed") if self._last is None else self._last.seed
        if seed is not None and "seed" not in more:  # of the flags or of the daemon: it would give the same answer
            more["seed"] = (seed + 1) % (MAX_SEED + 1)
        if self._is_greedy and self._unanswered is None and "temperature" not in more:
            if "temperature" in self._fields:
                note("nothing was drawn at random, so the answer is the same; try /retry 0.8")
            else:
                higher = RETRY_TEMPERATURE + RETRY_STEP * (self._n_retries - 1)
                more["temperature"] = min(HIGHEST_RETRY_TEMPERATURE, round(higher, 1))
                note(f"with temperature {more['temperature']:g}, since the answer would be the same without")
        self._ask(question, retry=self._unanswered is None, more=more)

    def _continue(self, _: str) -> None:
        if self._unanswered is not None or not self._conversation.last_answer:
            note("there is no answer to continue")
            return
        before = self._conversation.last_answer
        eos = self._answer(self._conversation.continuation(), self._conversation.continued, "/continue tries again")
        if eos is not None and eos.reason == "stop" and self._conversation.last_answer == before:
            note("the answer ends here; /retry asks for another one")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        writers = {".md": as_markdown, ".markdown": as_markdown, ".json": as_json}
        if path.suffix not in writers:
            note("the name must end with .md or .json, as in /save chat.md")
            return
        if not self._conversation.transcript():
            note("there is nothing to save yet")
            return
        text = writers[path.suffix](self._conversation.transcript())
        try:
            if path.exists() and not self._may_replace(path):
                note(f"{path} stays as it is")
                return
            replace_text(path, text)
        except OSError as error:
            note(f"cannot write {path}: {error.strerror}")
        else:
            self._saved[path] = text
            note(f"saved to {path}")

    def _may_replace(self, path: Path) -> bool:
        """Whether what is in a file may go: this conversation wrote it, or the user says so."""
        try:
            if path in self._saved and read_text(path) == self._saved[path]:
                return True
        except (OSError, UnicodeDecodeError):
            pass  # so it is not what was written
        return self._input.confirm(f"{path} exists already. Overwrite it?")

    def _stats(self, _: str) -> None:
        if self._last is None:
            note("there is no answer yet")
        else:
            print_stats(self._last)

    def _help(self, _: str) -> None:
        width = max(len(name) + len(argument) for name, (argument, _) in COMMANDS.items()) + 3
        for name, (argument, meaning) in COMMANDS.items():
            note(f"{name} {argument}".ljust(width) + meaning)
        note("Enter sends; Alt-Enter, or a backslash before Enter, begins another line; Ctrl-C cancels an answer")
        note("a message that is sent while the model answers interrupts it, and the model goes on with that; any other")
        note("command waits for the end of the answer, as do the messages after it")

    def _too_late(self, _: str) -> None:
        note("this changes an answer while it is written: type it then")

    def _quit(self, _: str) -> None:
        raise Quit

    # -- one turn -------------------------------------------------------------------------------

    def _ask(self, question: str, *, retry: bool = False, more: dict[str, Any] | None = None) -> None:
        self._unanswered = question if not retry else None

        def keep(*answer: Message) -> None:
            self._conversation.answered(question, *answer, retry=retry)
            self._unanswered = None

        fields = {**(more or {}), **self._conversation.request(question, retry=retry)}
        eos = self._answer(fields, keep, "/retry asks again, and Up brings the message back")
        if eos is not None and not retry:
            self._is_greedy = eos.seed is None

    def _answer(self, fields: dict[str, Any], keep: Callable[..., None], remedy: str) -> Eos | None:
        """Show the answer to a request, and add it to the conversation.

        Args:
            keep: gets the messages of the answer, if there is some.
            remedy: after an error.

        Returns:
            The end of the answer; ``None`` if there is none.
        """
        eos = self._turn({**self._fields, **fields}, keep, remedy)
        if self._is_terminal:
            click.echo(err=True)
        return eos

    def _turn(self, request: dict[str, Any], keep: Callable[..., None], remedy: str) -> Eos | None:
        view = self._view()
        answer: list[Message] = [{"role": "assistant", "content": ""}]
        try:
            eos = run(self._stream, request, view, answer)
        except ClientError as error:
            view.finish()
            self._fail(error)
            note(remedy)
            return None
        except KeyboardInterrupt:  # before the signal handler was there, or a second time
            view.finish()
            note("cancelled; the conversation is as before")
            return None
        view.finish()
        self._last = eos
        if eos.usage.completion_tokens:
            keep(*answer)
        self._remark(eos, request.get("max_tokens"))
        return eos

    def _view(self) -> AnswerView:
        return MarkdownView(sys.stdout) if self._renders else PlainView(sys.stdout)

    async def _stream(self, request: dict[str, Any], view: AnswerView, answer: list[Message]) -> Eos:
        """Show the answer to ``request``, and change it as the user wants.

        Args:
            answer: as ``messages`` of ``ShownAnswer``.

        Raises:
            ClientError: there is no answer.
            KeyboardInterrupt: the second Ctrl-C.
        """
        shown = ShownAnswer(view, answer, show_reasoning=self._show_reasoning)

        async def refresh() -> None:
            while True:
                view.refresh()
                await trio.sleep(FRAME_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refresh)
            name = new_id("chat")  # another program of the user may chat, too
            nursery.start_soon(self._steer, name, shown)
            last = await generate({"id": name, **request}, shown.show, self._socket)
            nursery.cancel_scope.cancel()
        shown.close()
        if last is None:
            raise KeyboardInterrupt
        return last

    async def _steer(self, request_id: str, shown: ShownAnswer) -> None:
        """Change an answer as the lines say that the user types while it is shown."""
        async for line in self._input.lines():
            if not await self._change(request_id, line, shown):
                self._input.keep(line)
                shown.notify(f"kept until the answer is complete: {line}")

    async def _change(self, request_id: str, line: str, shown: ShownAnswer) -> bool:
        """Change the answer as ``line`` says; returns False if it has to wait for the end of the answer."""
        change = change_of(line)
        if change is None:
            problem = f"give a text, as in {line} TEXT" if line in CHANGES else _problem(line)
            if problem is not None:
                shown.notify(problem)
            return problem is not None
        if "message" in change and self._input.keeps:
            return False  # it was typed after a command that waits
        try:
            await asked(self._socket, lambda client: client.steer(request_id, **change))
        except ClientError as error:
            if isinstance(error, ServerError) and error.code != "E_ANSWER_NOT_FOUND":
                shown.notify(f"{error}", colour="red")
            elif "message" in change:
                return False
            else:
                shown.notify("the answer has not begun yet, or has just ended")
        else:
            if "stop" in change:
                shown.notify("ends after this sentence; Ctrl-C ends it now")
        return True

    def _remark(self, eos: Eos, max_tokens: int | None) -> None:
        """Say what the user should know of an answer."""
        if eos.reason == "cancelled":
            kept = "what you see stays in the conversation" if eos.usage.completion_tokens else "nothing was answered"
            note(f"cancelled; {kept}")
        warn_if_cut(eos, max_tokens, "/set max_tokens")
        if eos.reason == "length" and self._is_terminal:
            note("/continue goes on with it")
        if eos.usage.dropped_tokens:
            note(
                f"the conversation no longer fits the context: its oldest {eos.usage.dropped_tokens:,} tokens were "
                "dropped"
            )
        if eos.session is not None and eos.session.turns == 1:
            warn_if_in_memory(eos)
        try:
            restarts = _restarts(self._metrics())
        except ClientError:
            return  # the next turn tells
        if restarts > self._restarts:
            note("the engine was restarted; no text was lost")
        self._restarts = restarts

    def _fail(self, error: ClientError) -> None:
        """Report why there is no answer; stdin that is no terminal ends with it."""
        if not self._is_terminal:
            raise error
        if isinstance(error, ServerError):
            note(f"{error}", colour="red")
            if error.code in CHAT_HINTS:
                note(CHAT_HINTS[error.code])
            return
        gone = f"{error}" if isinstance(error, NoDaemon) else "the daemon went away; the conversation is as before"
        note(gone, colour="red")

    # -- queries --------------------------------------------------------------------------------

    def _query(self, question: Callable[[Client], Awaitable[T]]) -> T:
        answer: T = run(asked, self._socket, question)
        return answer

    def _description(self) -> ModelDescription:
        """The model that answers."""
        return self._query(lambda client: client.models(model=self._fields.get("model")))[0]

    def _metrics(self) -> dict[str, Any]:
        return self._query(lambda client: client.metrics())


def _problem(line: str) -> str | None:
    """Why a line that begins with / is no command; ``None`` if it is one, or the path of a file."""
    name = line.partition(" ")[0]
    if name in COMMANDS or name in LEAVING or dropped_file(line) is not None:
        return None
    known = OF_OTHER_PROGRAMS.get(name)
    close = [known] if known else difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
    meant = f"did you mean {close[0]}?" if close else "/help lists the commands."
    return f"there is no command {name}; {meant} A message that begins with / is sent with //"


def _restarts(snapshot: Mapping[str, Any]) -> int:
    """Restarts of the engines of all models that are loaded."""
    models = [snapshot, *(model.get("metrics", {}) for model in snapshot.get("models", {}).values())]
    return sum([model["engine"]["restarts_total"] for model in models if "engine" in model])
