"""Why peers believe each other: what they say is signed with a secret that all of them share, for one receiver, once.

Others on the way cannot change it.  Whether they can read it depends on TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final, Literal

import attrs

MAX_NONCES: Final = 10_000
"""Questions with one stamp."""


class NotSigned(Exception):
    """It is not signed with the secret, or it came before."""


class OldStamp(Exception):
    """The question does not have the stamp of now.  The peer learns it from the answer, and asks again."""


@attrs.frozen
class Signer:
    """Signs questions and answers."""

    _secret: bytes = attrs.field(repr=False)

    def question(self, body: bytes) -> tuple[str, str]:
        """A new nonce, and the header of a question."""
        nonce = secrets.token_hex(16)
        return nonce, f"{nonce}.{self._signature('question', nonce, body)}"

    def nonce_of(self, header: str, body: bytes) -> str:
        """The nonce of a question that has arrived.

        Raises:
            NotSigned: it is not signed with the secret.
        """
        nonce, _, signature = header.partition(".")
        self._compare(signature, self._signature("question", nonce, body))
        return nonce

    def answer(self, nonce: str, body: bytes) -> str:
        """The header of the answer to the question with this nonce."""
        return self._signature("answer", nonce, body)

    def check_answer(self, header: str, nonce: str, body: bytes) -> None:
        """
        Raises:
            NotSigned: it is not the answer to the question with this nonce.
        """
        self._compare(header, self._signature("answer", nonce, body))

    def _signature(self, kind: Literal["question", "answer"], nonce: str, body: bytes) -> str:
        return hmac.new(self._secret, f"{kind} {nonce} ".encode() + body, hashlib.sha256).hexdigest()

    @staticmethod
    def _compare(signature: str, expected: str) -> None:
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            raise NotSigned


@attrs.define(eq=False)
class Reception:
    """Takes each question once: a question has the stamp of the daemon that it is for, and a nonce.

    The stamp is random, and changes with each start and after many questions, so the nonces of one stamp are all that must
    be remembered.  It needs no clock.
    """

    stamp: str = attrs.field(factory=lambda: secrets.token_hex(16), init=False)
    _nonces: set[str] = attrs.field(factory=set, init=False)

    def admit(self, stamp: str, nonce: str) -> None:
        """Take a question that is signed.

        Raises:
            OldStamp: it is to be asked again with ``stamp``.
            NotSigned: it came before, so somebody repeats it.
        """
        if stamp != self.stamp:
            raise OldStamp
        if nonce in self._nonces:
            raise NotSigned
        self._nonces.add(nonce)
        if len(self._nonces) >= MAX_NONCES:
            self.stamp, self._nonces = secrets.token_hex(16), set()
