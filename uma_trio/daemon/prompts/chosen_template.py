"""The chat template that the settings name: one of ``templates/``, or a file.

Unlike the template of a model file, it must work: a broken one ends the start.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

import attrs

from uma_trio.daemon.prompts.chat import BrokenTemplate, ChatTemplate
from uma_trio.engine_link.load_errors import ModelError
from uma_trio.errors import BadRequest, ModelUnavailable
from uma_trio.files import read_text

FOLDER: Final = Path(__file__).parent / "templates"

EXAMPLE: Final = ({"role": "user", "content": "Hello"},)


@attrs.frozen
class TemplateSource:
    """A chat template that is not compiled yet."""

    text: str
    """In Jinja."""
    origin: str
    """Where it comes from, for people."""


def built_in() -> list[str]:
    """Names of the templates that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def choose_template(given: str) -> TemplateSource:
    """Read the chat template that the settings name, and try it.  Blocks for about 50 ms.

    Args:
        given: one of ``built_in``, or the path of a file.

    Raises:
        ModelError: there is no such template, or it does not work.
    """
    if given in built_in():
        return TemplateSource((FOLDER / f"{given}.jinja").read_text(), f"{given} (built in)")
    try:
        path = Path(given).expanduser()
        source = TemplateSource(read_text(path), str(path))
    except FileNotFoundError:
        nearest = difflib.get_close_matches(given, built_in(), n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ModelError(
            f"there is no chat template {given}",
            f"{hint}--chat-template takes a Jinja file, or one of {', '.join(built_in())}",
        ) from None
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # ValueError: a NUL in the path; RuntimeError: ~ of an unknown user
        reason = (isinstance(error, OSError) and error.strerror) or error
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        raise ModelError(
            f"cannot read the chat template {given}: {reason}", "--chat-template takes a Jinja file"
        ) from None
    _try(source)
    return source


def _try(source: TemplateSource) -> None:
    name = f"the chat template {source.origin}"
    if not source.text.strip():
        raise ModelError(f"{name} is empty", "correct it, or give --chat-template another one")
    try:
        ChatTemplate(source.text, bos="", eos="", name=name).render(EXAMPLE)
    except BadRequest:
        pass  # it compiles, and refuses a conversation without a system message
    except ModelUnavailable as error:
        raise ModelError(str(error)) from None
    except BrokenTemplate as error:
        raise ModelError(str(error), "correct it, or give --chat-template another one") from None
