"""The process that checks constraints: what it refuses, what it survives, and that it ends."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import psutil
import pytest

from tests.support.cases import all_cases
from tests.support.fake_engine import fake_vocabulary
from tests.support.hostile_constraints import ALL, HostileConstraint
from tests.support.profile import part, sampled
from uma_trio.errors import InvalidConstraint
from uma_trio.grammar.checker import LocalChecker, SandboxedChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.protocol.requests import Constraint

COSTLY = ("schema: multipleOf", "schema: many patterns", "gbnf: many rules")
"""They take seconds or gigabytes, whatever llguidance's limits are, or take Python that long."""


@pytest.fixture(scope="module")
def checker():
    return SandboxedChecker(fake_vocabulary)


@pytest.fixture(scope="module")
def compiler(checker):
    return GrammarCompiler(fake_vocabulary, checker)


def compile_(compiler: GrammarCompiler, constraint: dict[str, object]) -> str:
    """``ok``, or the message of the refusal."""
    try:
        compiler.compile(msgspec.convert(constraint, Constraint))
    except InvalidConstraint as error:
        return str(error)
    return "ok"


def pid_of(checker: SandboxedChecker) -> int | None:
    process = checker._sandbox._child._process
    return None if process is None else process.pid


@all_cases("hostile", part([each for each in ALL if each.name not in COSTLY], 3))
def test_a_hostile_constraint_is_compiled_or_refused_in_words_of_the_client(
    compiler: GrammarCompiler, hostile: HostileConstraint
) -> None:
    message = compile_(compiler, hostile.constraint)
    if message == "ok":
        return
    assert message.startswith(("constraint.", "the constraint has more than 64 KiB"))
    for foreign in ("at 1(", "<non-verbose", "Some(", "json-schema:///", "NoExtension", "lexer", "x-guidance", "\n"):
        assert foreign not in message, message
    assert len(message) <= 300


@pytest.mark.parametrize("hostile", sampled([each for each in ALL if each.name in COSTLY], 3), ids=str)
def test_what_costs_too_much_ends_the_process_and_the_next_one_is_compiled(
    compiler: GrammarCompiler, checker: SandboxedChecker, hostile: HostileConstraint
) -> None:
    assert compile_(compiler, {"regex": "1 "}) == "ok"
    before = pid_of(checker)
    assert "too complex" in compile_(compiler, hostile.constraint)
    assert not psutil.pid_exists(before or 0)
    assert compile_(compiler, {"regex": "2 "}) == "ok"


def test_rules_that_need_more_stack_than_a_thread_has_by_default(compiler: GrammarCompiler) -> None:
    rules = "start: r0\n" + "".join([f"r{n}: /{n}/ r{n + 1}\n" for n in range(2800)]) + "r2800: /1/"
    assert compile_(compiler, {"lark": rules}) == "ok"


def test_a_process_that_something_else_kills_is_replaced(compiler: GrammarCompiler, checker: SandboxedChecker) -> None:
    assert compile_(compiler, {"regex": "[0-9]{2} "}) == "ok"
    psutil.Process(pid_of(checker)).kill()
    psutil.wait_procs([psutil.Process(pid_of(checker))])
    assert compile_(compiler, {"regex": "[0-9]{3} "}) == "ok"


def test_large_grammars_one_after_another_do_not_fill_the_memory(compiler: GrammarCompiler) -> None:
    """They take 30 MB each, and the process has room for eight."""
    for n in range(12):
        text = "".join([str((n + i) % 10) for i in range(60_000)])
        assert compile_(compiler, {"regex": text}) == "ok"


def test_in_this_process_as_in_the_other_one(compiler: GrammarCompiler) -> None:
    local = GrammarCompiler(fake_vocabulary, LocalChecker(fake_vocabulary))
    for constraint in ({"regex": "(a"}, {"choice": ["1 ", "2 "]}, {"gbnf": 'root ::= "1" root'}, {"lark": "start: x"}):
        assert compile_(local, constraint) == compile_(compiler, constraint)


def test_a_refusal_is_not_kept_and_a_grammar_is() -> None:
    compiler = GrammarCompiler(fake_vocabulary, LocalChecker(fake_vocabulary))
    constraint = Constraint(regex="1 ")
    assert compiler.find(constraint) is None
    assert compiler.compile(constraint) is compiler.compile(constraint) is compiler.find(constraint)
    assert (compiler.compiled_total, compiler.reused_total) == (1, 2)


def test_the_process_ends_with_the_daemon_even_after_kill_9() -> None:
    code = """
import os
from tests.support.fake_engine import fake_vocabulary
from uma_trio.grammar.checker import SandboxedChecker
SandboxedChecker(fake_vocabulary).check("start: /1/")
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == -9
