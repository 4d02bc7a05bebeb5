"""The link contract on the real library, in a child process and in a thread; and what only a process shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import psutil
import pytest
import trio

from tests.support.link_contract import *  # noqa: F403
from tests.support.link_contract import answers, prefill
from tests.support.profile import sampled, thorough
from tests.support.random_models import random_model
from uma_trio import config
from uma_trio.daemon.engines.link import ProcessLauncher, ThreadLauncher
from uma_trio.daemon.engines.process import EngineProcess
from uma_trio.engine.open_fitted import open_engine
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import EngineDied, LoadError, Revoked, Start, Step, StepInput
from uma_trio.grammar.checker import LocalChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.grammar.vocabulary import Vocabulary
from uma_trio.models.packaged import EMBEDDED
from uma_trio.protocol.requests import Constraint
from uma_trio.tokenizer.tokenizer import open_vocabulary

pytestmark = pytest.mark.usefixtures("forked_children")

SETTINGS = config.Model(ctx=4096, parallel=4, batch_tokens=64, threads=1, layout_trial_s=0)


@pytest.fixture(scope="module")
def prompts(library):
    """Chats whose answers are long."""
    with open_vocabulary(EMBEDDED) as vocabulary:
        return [
            vocabulary.tokenizer.encode(
                f"<|im_start|>user\nCount from {n} to 90<|im_end|>\n<|im_start|>assistant\n"
            ).tolist()
            for n in range(1, 6)
        ]


@pytest.fixture(scope="module")
def grammar(library):
    text = "The capital of Peru is Lima."
    with open_vocabulary(EMBEDDED) as opened:
        tokenizer = opened.tokenizer
        end_id = tokenizer.encode("<|im_end|>").tolist()[-1]

        def vocabulary() -> Vocabulary:
            return tokenizer.grammar_vocabulary([end_id])

        compiler = GrammarCompiler(vocabulary, LocalChecker(vocabulary))
        found = compiler.compile(Constraint(choice=[text]))
        return found.key, found.source, tokenizer.encode(text, add_special=False, continues=True).tolist()


@pytest.fixture(params=["process", thorough("thread")])
async def link(request, nursery, library):
    launcher = ProcessLauncher(nursery) if request.param == "process" else ThreadLauncher(nursery, open_engine)
    link = launcher.launch(EMBEDDED.name)
    assert await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
    yield link
    await link.aclose()


@pytest.fixture
async def child(nursery, library):
    link = ProcessLauncher(nursery).launch(EMBEDDED.name)
    assert await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
    yield link
    await link.aclose()


@pytest.mark.parametrize("number", sampled([signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGBUS], 4))
async def test_the_reason_of_a_death_names_the_signal_and_the_log_says_where(child, number, caplog):
    os.kill(child.pid, number)
    kill = number is signal.SIGKILL
    with trio.fail_after(60), pytest.raises(EngineDied, match=number.name + ("" if kill else ": Fatal Python error: ")):
        await child.receive()
    assert kill or "engine/worker.py" in caplog.text


async def test_rows_of_k_quants_are_reproducible(nursery, library):
    """The start compares them.  The library looks only once which kernels to use, so this needs a process of its own."""
    settings = attrs.evolve(SETTINGS, reproducible=True, devices=("none",))
    link = ProcessLauncher(nursery).launch("q4_k")
    start = Start(random_model("4x256x4x2x512", "q4_k"), settings)
    assert await link.load(start, lambda share: None, lambda: True)
    assert link.info.max_rows == 48
    await link.aclose()


async def test_a_step_that_gives_way_is_interrupted(link, prompts):
    """Its flag is set before it comes, so that it cannot be complete by then; what runs ahead of it is withdrawn too."""
    expected = await link.compute(Step((), [[prefill(1, prompts[1])]], 1))
    gives_way = Step([Truncate(1)], [[prefill(1, prompts[1])]], 2, gives_way=True)
    link._interrupts.set(2)
    link._send(gives_way)
    link.submit(Step((), [[1]], 3, 2))
    assert await answers(link, 2) == [Revoked(2, began=True), Revoked(3)]
    gives_way.number = 4
    assert (await link.compute(gives_way)).tokens == expected.tokens
    link.revoke(4)  # too late


async def test_a_stopped_engine_is_killed_also_without_a_step(child):
    os.kill(child.pid, signal.SIGSTOP)
    with trio.fail_after(60):
        await child.ended.wait()
    assert "stopped by a signal" in child.reason
    with trio.fail_after(60), pytest.raises(EngineDied, match="stopped by a signal"):
        await child.receive()


async def test_it_is_named_after_its_model_and_reports_what_it_uses(child):
    assert "uma-trio engine: embedded.gguf" in " ".join(psutil.Process(child.pid).cmdline())
    usage = child.usage()
    assert usage["rss_bytes"] > 1_000_000
    assert usage["cpu_s"] > 0


async def test_closed_while_it_computes_it_ends(child):
    pid = child.pid
    long = [StepInput(seq, 0, [5] * 64, ()) for seq in range(4)]
    child.submit(Step((), [[each] for each in long], 1))
    with trio.fail_after(60):
        await child.aclose()
    assert not psutil.pid_exists(pid)


async def test_its_log_lines_come_out_of_this_process_with_the_model(nursery, library, caplog):
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", "llama_abi")  # a daemon in this process has perhaps raised it
    link = ProcessLauncher(nursery).launch(EMBEDDED.name)
    assert await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
    await link.aclose()
    record = next(record for record in caplog.records if "n_ctx_train" in record.getMessage())
    assert record.name == "llama_abi"
    assert record.model == "embedded.gguf"
    assert record.getMessage().startswith("print_info")


async def test_what_the_library_says_before_it_aborts_is_the_reason(nursery, library, tmp_path):
    module = tmp_path / "engine_that_asserts.py"
    module.write_text(
        "import os, sys\n"
        "print('/src/ggml.c:7: GGML_ASSERT(eps >= 0.0f) failed', file=sys.stderr, flush=True)\n"
        "os.abort()\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{before}"
    try:
        link = ProcessLauncher(nursery, "engine_that_asserts").launch("bad.gguf")
    finally:
        os.environ["PYTHONPATH"] = before
    with trio.fail_after(60), pytest.raises(LoadError, match=r"SIGABRT.*GGML_ASSERT\(eps >= 0.0f\) failed"):
        await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
    assert link.ended.is_set()


async def test_no_descriptor_and_no_process_is_left(nursery, library):
    launcher = ProcessLauncher(nursery)
    me = psutil.Process()
    for n in range(4):
        link = launcher.launch(EMBEDDED.name)
        assert await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
        link.submit(Step((), [[prefill(0, [5, 6])]], 1))
        await answers(link, 1)
        if n % 2:
            link.kill()
        await link.aclose()
        if n == 0:
            fds = me.num_fds()
    assert me.num_fds() == fds
    assert not [child for child in me.children() if "uma-trio engine" in " ".join(child.cmdline())]


async def test_a_process_that_was_started_before_is_the_first_engine(nursery, library):
    """Its libraries were imported meanwhile.  The second model gets another process."""
    process = EngineProcess.start()
    launcher = ProcessLauncher(nursery, prestarted=process)
    links = [launcher.launch(EMBEDDED.name) for _ in range(2)]
    process.close()  # it belongs to the link now, which goes on
    assert len({link.pid for link in links}) == 2
    for link in links:
        assert await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
        await link.aclose()


def test_a_process_without_a_model_ends_with_the_start():
    me = psutil.Process()
    fds, children = me.num_fds(), {*me.children()}
    process = EngineProcess.start()
    assert len({*me.children()} - children) == 1
    process.close()
    assert ({*me.children()} - children, me.num_fds()) == (set(), fds)


PARENT = """
import sys, trio
from tests.model.test_engine_process import EMBEDDED, SETTINGS
from uma_trio.daemon.engines.link import ProcessLauncher
from uma_trio.engine_link.messages import Start

async def main():
    async with trio.open_nursery() as nursery:
        link = ProcessLauncher(nursery).launch("embedded.gguf")
        await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
        print(link.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize("stopped", sampled([False, True], 2))
def test_it_ends_with_its_parent_also_after_kill_9(library, stopped):
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        if stopped:
            engine.suspend()
            while engine.status() != psutil.STATUS_STOPPED:  # only a group that has stopped gets the kernel's SIGHUP
                time.sleep(0.001)
        parent.kill()
    engine.wait(60)
