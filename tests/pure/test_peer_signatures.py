"""Signatures between peers: each question is taken once, by the daemon that it is for."""

from __future__ import annotations

import pytest

from uma_trio.gateway.peers import signatures
from uma_trio.gateway.peers.signatures import NotSigned, OldStamp, Reception, Signer

OURS, THEIRS = Signer(b"a" * 32), Signer(b"b" * 32)
BODY = b'{"action": "ask"}'


def test_a_question_and_its_answer_belong_together() -> None:
    nonce, header = OURS.question(BODY)
    assert OURS.nonce_of(header, BODY) == nonce
    OURS.check_answer(OURS.answer(nonce, b"yes"), nonce, b"yes")
    other, _ = OURS.question(BODY)
    for answer, at, body in (
        (OURS.answer(nonce, b"yes"), nonce, b"no"),
        (OURS.answer(nonce, b"yes"), other, b"yes"),
        (THEIRS.answer(nonce, b"yes"), nonce, b"yes"),
        (header.partition(".")[2], nonce, BODY),
        ("", nonce, b"yes"),
        ("\udcff", nonce, b"yes"),
    ):
        with pytest.raises(NotSigned):
            OURS.check_answer(answer, at, body)


def test_nobody_else_can_ask() -> None:
    _, header = OURS.question(BODY)
    for found, body in ((THEIRS.question(BODY)[1], BODY), (header, b"{}"), (f"n{header}", BODY), ("", BODY)):
        with pytest.raises(NotSigned):
            OURS.nonce_of(found, body)


def test_a_question_is_taken_once_and_with_the_stamp_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "MAX_NONCES", 3)
    reception, old = Reception(), Reception().stamp
    with pytest.raises(OldStamp):
        reception.admit(old, "n1")
    first = reception.stamp
    reception.admit(first, "n1")
    with pytest.raises(NotSigned):
        reception.admit(first, "n1")
    reception.admit(first, "n2")
    reception.admit(first, "n3")
    assert reception.stamp != first, "after so many questions the nonces are forgotten, so their stamp is"
    with pytest.raises(OldStamp):
        reception.admit(first, "n1")
