"""Prompts and biases of llama-server's API, where texts may stand for tokens."""

from __future__ import annotations

import contextlib
from itertools import groupby
from typing import Any, Final

from uma_trio.client import Client
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.requests import BANNED, MAX_BIASES

MAX_PARTS: Final = 1024
"""Texts in prompts and in ``logit_bias`` that become tokens before the request."""

Tokens = list[int]


def is_several(prompt: Any) -> bool:
    """Whether these are several prompts: a list of texts, or one that has a list or an object."""
    if not isinstance(prompt, list):
        return False
    kinds = set(map(type, prompt))
    return kinds == {str} or not kinds.isdisjoint({list, dict})


class Translation:
    """Turns texts into tokens where llama-server allows either.  Asks the daemon only if it has to.

    Args:
        model: whose tokens.
        parse_special: whether a text among tokens may spell control tokens.
    """

    def __init__(self, call: Call, model: str | None, *, parse_special: bool = True) -> None:
        self._call = call
        self._fields: dict[str, Any] = {"keep_alive": True, "parse_special": parse_special}
        if model is not None:
            self._fields["model"] = model
        self._connection = contextlib.AsyncExitStack()
        self._client: Client | None = None
        self._parts = 0

    async def __aenter__(self) -> Translation:
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._connection.__aexit__(*error)

    async def prompts(self, given: Any, parameter: str, *, most: int) -> list[str | Tokens]:
        """All prompts, or texts to embed, of a request.

        Raises:
            HttpError: they are neither texts nor tokens, or more than ``most``.
        """
        items = given if is_several(given) else [given]
        if len(items) > most:
            raise invalid(f"{parameter} has {len(items)} texts; send at most {most}", parameter=parameter)
        async with self._call.part():
            ready = [_as_it_is(prompt) for prompt in items]
        return [
            await self._prompt(prompt, parameter) if prepared is None else prepared
            for prompt, prepared in zip(items, ready, strict=True)
        ]

    async def _prompt(self, given: Any, parameter: str) -> Tokens:
        """The tokens of a prompt that has texts among tokens."""
        match given:
            case [_, *_] if set(map(type, given)) <= {int, str}:
                tokens: Tokens = []
                for kind, parts in groupby(given, type):
                    if kind is int:
                        tokens += parts
                        continue
                    for text in parts:
                        tokens += await self._tokens(text, add_special=not tokens)
                return tokens
            case []:
                raise invalid(f"{parameter} must have at least one text; it is an empty list", parameter=parameter)
        raise invalid(
            f"{parameter} must be a text, a list of token ids with texts among them, or a list of these",
            parameter=parameter,
        )

    async def tokens(self, prompt: str | Tokens) -> Tokens:
        """The tokens of a prompt, as a request would prefill them."""
        return await self._tokens(prompt, add_special=True) if isinstance(prompt, str) else prompt

    async def logit_bias(self, given: Any) -> dict[str, float] | None:
        """The bias of each token.  That of a text is the bias of each of its tokens.

        Raises:
            HttpError: these are not pairs of a token or a text and a bias.
        """
        if given is None:
            return None
        if isinstance(given, dict | list) and len(given) > MAX_BIASES:
            raise invalid(f"logit_bias has {len(given)} pairs; send at most {MAX_BIASES}", parameter="logit_bias")
        biases: dict[str, float] = {}
        for pair in given.items() if isinstance(given, dict) else given if isinstance(given, list) else [None]:
            match pair:
                case (int() | str() as what, False | int() | float() as bias) if bias is not True:
                    is_token = type(what) is int or str(what).isdecimal()
                    for token in [what] if is_token else await self._tokens(str(what), add_special=False):
                        biases[str(token)] = BANNED if bias is False else float(bias)
                case _:
                    raise invalid(
                        "logit_bias must have pairs of a token or a text and a number or false", parameter="logit_bias"
                    )
        return biases

    async def _tokens(self, text: str, *, add_special: bool) -> Tokens:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid(f"more than {MAX_PARTS} texts would have to become tokens; send tokens")
        if self._client is None:
            self._client = await self._connection.enter_async_context(self._call.daemon.connect())
        return (await self._client.tokenize(text, add_special=add_special, **self._fields)).tokens


def _as_it_is(prompt: Any) -> str | Tokens | None:
    """The prompt, if it needs no translation."""
    match prompt:
        case str() as text:
            return text
        case {"prompt_string": str() as text, **others} if not others.get("multimodal_data"):
            return text
        case {"content": [*parts]} if all(_is_text_part(part) for part in parts):
            return "".join(part["text"] for part in parts)
        case list() if set(map(type, prompt)) == {int}:  # up to half a million
            return prompt
    return None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
