"""The controllers that come with uma-trio, as an engine drives them that chooses any allowed token."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from tests.support.documents import ROOT
from tests.support.profile import amount, sampled
from uma_trio.aici.controllers import shipped
from uma_trio.aici.controllers.__main__ import FLAGS, HERE, BuildError, find_tools
from uma_trio.aici.runtime.controller import Controller
from uma_trio.aici.runtime.host import Module, WasmHost
from uma_trio.aici.runtime.interface import ControllerError, Limits, Splice, StopSequence
from uma_trio.aici.runtime.variables import Variables

EOS, BOS = 0, 1

WORDS = [
    "Ultimate",
    " answer",
    " is",
    " life",
    "42",
    "yes",
    "no",
    "ye",
    "es",
    " HELLO",
    "hello",
    "É",
    "é",
    "ab",
    "abc",
    "true",
    '{"',
]
TOKENS = [b"", b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
"""The end token, the begin token, all bytes, and some words."""

SEED_PROGRAM = r"""async function main() {
    await $`Ultimate answer is to the life, universe and everything is `
    await gen({ regex: /\d\d/ })
}

start(main)
"""

Choose = Callable[[Sequence[int], Sequence[int]], int]
"""Which of the allowed tokens the model says after which tokens."""


def tokenize(text: bytes) -> list[int]:
    """The longest token, again and again."""
    ids = []
    while text:
        token = max(
            (token for token in range(len(TOKENS)) if TOKENS[token] and text.startswith(TOKENS[token])),
            key=lambda token: len(TOKENS[token]),
        )
        ids.append(token)
        text = text[len(TOKENS[token]) :]
    return ids


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode("utf-8", "replace")


class _Vocabulary:
    n_vocab, eos = len(TOKENS), EOS

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token]

    def tokenize(self, text: bytes) -> list[int]:
        return tokenize(text)

    def tokenize_prompt(self, text: str) -> list[int]:
        return [BOS, *tokenize(text.encode())]


class Controllers:
    """The shipped modules, in a host."""

    def __init__(self) -> None:
        self.host = WasmHost(_Vocabulary(), Limits())
        self.modules: dict[str, Module] = {
            name: self.host.load(self.host.compile(wasm)) for name, wasm in shipped().items()
        }


def soon() -> float:
    """A deadline that a loaded machine keeps."""
    return time.monotonic() + 60


@attrs.define
class LiveSequence:
    """One sequence of a run."""

    id: int
    controller: Controller
    tokens: list[int]
    fork_group: list[int] = attrs.field(factory=list)
    reported: tuple[list[int], int] | None = None
    logs: str = ""
    error: str = ""
    n_steps: int = 0
    n_suspended: int = 0

    @property
    def text(self) -> str:
        return text_of(self.tokens)


@attrs.define
class Run:
    """A request, driven to its end."""

    sequences: list[LiveSequence]
    variables: Variables

    @property
    def only(self) -> LiveSequence:
        [sequence] = self.sequences
        assert not sequence.error, sequence.error
        return sequence


@pytest.fixture(scope="module")
def controllers() -> Iterator[Controllers]:
    found = Controllers()
    yield found
    found.host.close()


def anything(seed: int = 0) -> Choose:
    """A model that chooses anything, and the same after the same text."""
    return lambda allowed, tokens: random.Random(f"{seed} {tokens}").choice(allowed)


def saying(text: str) -> Choose:
    """A model that wants to say ``text`` and then end, where it may."""
    left = [text.encode()]

    def choose(allowed: Sequence[int], tokens: Sequence[int]) -> int:
        fitting = [token for token in allowed if TOKENS[token] and left[0].startswith(TOKENS[token])]
        if fitting:
            token = max(fitting, key=lambda each: len(TOKENS[each]))
            left[0] = left[0][len(TOKENS[token]) :]
            return token
        return EOS if EOS in allowed else allowed[0]

    return choose


class Driver:
    """What an engine does with a request, with a model that chooses by ``choose``."""

    def __init__(self, controllers: Controllers, controller: str, argument: str, choose: Choose) -> None:
        self.choose = choose
        self.variables = Variables()
        first = controllers.host.instantiate(controllers.modules[controller], argument, self.variables)
        first.assign(0)
        self.live = [LiveSequence(0, first, [BOS])]
        self.all = list(self.live)
        self.guarded(self.start, self.live[0])
        self.row = np.zeros(len(TOKENS), np.float32)

    def run(self, max_steps: int = 300) -> Run:
        for _ in range(max_steps):
            if not self.live:
                return Run(self.all, self.variables)
            self.step()
        pytest.fail(f"not at its end after {max_steps} steps: {[each.text for each in self.live]}")

    def step(self) -> None:
        ready = [each for sequence in list(self.live) for each in self.guarded(self.post_pre, sequence)]
        for sequence in ready:
            self.guarded(self.mid, sequence)

    def guarded(self, call: Callable[[LiveSequence], list[LiveSequence]], sequence: LiveSequence) -> list[LiveSequence]:
        try:
            return call(sequence)
        except ControllerError as error:
            sequence.error = sequence.controller.take_logs() + str(error)
            self.live.remove(sequence)
            return []
        finally:
            sequence.logs += sequence.controller.take_logs()

    def start(self, sequence: LiveSequence) -> list[LiveSequence]:
        sequence.controller.start(sequence.tokens, deadline=soon())
        return []

    def post_pre(self, sequence: LiveSequence) -> list[LiveSequence]:
        controller = sequence.controller
        if sequence.reported is not None and controller.post_process(*sequence.reported, deadline=soon()):
            self.live.remove(sequence)
            return []
        sequence.reported = None
        for _ in range(10):
            pre = controller.pre_process(deadline=soon())
            n_forks = pre.num_forks
            if not pre.ff_tokens:
                break
            sequence.tokens += pre.ff_tokens
            if controller.post_process(pre.ff_tokens, 0, deadline=soon()):
                n_forks = 0
                break
        else:
            raise ControllerError("too many ff_tokens rounds from pre_process")
        if n_forks == 0:
            self.live.remove(sequence)
            return []
        if pre.suspend:
            sequence.n_suspended += 1
            return []
        clones = [
            LiveSequence(len(self.all) + i, controller.fork(len(self.all) + i), list(sequence.tokens))
            for i in range(n_forks - 1)
        ]
        self.live += clones
        self.all += clones
        group = [sequence, *clones]
        for each in group:
            each.fork_group = [member.id for member in group]
        return group

    def mid(self, sequence: LiveSequence) -> list[LiveSequence]:
        sequence.n_steps += 1
        action = sequence.controller.mid_process(sequence.fork_group, self.row, deadline=soon())
        if isinstance(action, StopSequence):
            tokens, backtrack = [EOS], 0
        elif isinstance(action, Splice):
            tokens, backtrack = [*action.ff_tokens], action.n_removed
            assert tokens, "a splice without a token leaves the engine without logits"
            assert backtrack <= len(sequence.tokens)
        else:
            allowed = np.flatnonzero(self.row == 0.0).tolist()
            assert allowed, "nothing is allowed"
            tokens, backtrack = [self.choose(allowed, sequence.tokens)], 0
        sequence.tokens[len(sequence.tokens) - backtrack :] = tokens
        sequence.reported = tokens, backtrack
        return []


def run(controllers: Controllers, controller: str, argument: str, choose: Choose | None = None) -> Run:
    return Driver(controllers, controller, argument, choose or anything()).run()


def run_js(controllers: Controllers, body: str, choose: Choose | None = None) -> Run:
    """Run a program whose main has this body, from its line 2 on."""
    return run(controllers, "jsctrl", f"async function main() {{\n{body}\n}}\nstart(main)", choose)


def error_of(controllers: Controllers, program: str) -> str:
    """How a program fails."""
    [sequence] = run(controllers, "jsctrl", program).sequences
    assert sequence.error
    return sequence.error


def printed(sequence: LiveSequence) -> list[Any]:
    """The lines of the logs, each JSON."""
    return [json.loads(line) for line in sequence.logs.splitlines()]


# C


@pytest.mark.parametrize("seed", sampled(range(amount(quick=4, thorough=10)), 4))
def test_yesno_answers_yes_or_no(controllers: Controllers, seed: int) -> None:
    assert run(controllers, "yesno", "", anything(seed)).only.text in ("yes", "no")


@pytest.mark.parametrize("question", ["Is the sky blue?", "Is the sky blue?\n"])
def test_yesno_writes_the_question_first(controllers: Controllers, question: str) -> None:
    assert run(controllers, "yesno", question, anything()).only.text in (
        "Is the sky blue?\nyes",
        "Is the sky blue?\nno",
    )


def test_yesno_without_an_argument_asks_nothing(controllers: Controllers) -> None:
    assert run(controllers, "yesno", "null", anything()).only.text in ("yes", "no")


def test_yesno_splices_what_is_certain(controllers: Controllers) -> None:
    sequence = run(controllers, "yesno", "", saying("n")).only
    assert sequence.text == "no"
    assert TOKENS[sequence.tokens[1]] == b"n", "sampled, then o without a choice"


def test_uppercase_has_no_lower_case_letter(controllers: Controllers) -> None:
    driver = Driver(controllers, "uppercase", "", anything())
    for _ in range(300):
        if driver.live:
            driver.step()
    text = driver.all[0].text
    assert text
    assert not any(character.islower() for character in text)
    assert "\ufffd" not in text
    assert run(controllers, "uppercase", "", saying("1É HELLO")).only.text == "1É HELLO"
    assert run(controllers, "uppercase", "", saying("é")).only.text == ""


def test_the_c_example_of_the_page(controllers: Controllers, tmp_path: Path) -> None:
    try:
        tools = find_tools()
    except BuildError as error:
        pytest.skip(str(error))
    source, wasm = tmp_path / "mine.c", tmp_path / "mine.wasm"
    source.write_text((ROOT / "docs" / "AICI-CONTROLLERS.md").read_text().partition("```c\n")[2].partition("```")[0])
    subprocess.run([tools.clang, *FLAGS, "-Wall", "-Werror", f"-I{HERE}", f"-fuse-ld={tools.linker}", "-o", wasm, source], check=True)  # fmt: skip
    controllers.modules["mine"] = controllers.host.load(controllers.host.compile(wasm.read_bytes()))
    sequence = run(controllers, "mine", "", anything()).only
    generated = sequence.tokens[1:]
    assert generated[-1] == EOS
    assert len(set(generated)) == len(generated), "no token twice"


# JavaScript


@pytest.mark.parametrize("seed", range(amount(quick=4, thorough=20)))
def test_the_seeds_program_gives_two_digits(controllers: Controllers, seed: int) -> None:
    text = run(controllers, "jsctrl", SEED_PROGRAM, anything(seed)).only.text
    start = "Ultimate answer is to the life, universe and everything is "
    assert text.startswith(start)
    digits = text.removeprefix(start)
    assert len(digits) == 2
    assert digits.isascii()
    assert digits.isdigit()


def test_forks_know_their_index_and_the_parent_waits_for_all(controllers: Controllers) -> None:
    done = run_js(
        controllers,
        """
        await $`Hi `
        const index = await fork(4)
        const text = await gen({ choice: ["a1", "b2"] })
        setVar(`answer${index}`, index + text)
        if (index > 0) { print([index]); return }
        const answers = await waitVars("answer0", "answer1", "answer2", "answer3")
        print(answers)
        await $` ${answers.length}`
        """,
        anything(7),
    )
    parent, *children = done.sequences
    assert [printed(each) for each in children] == [[[1]], [[2]], [[3]]]
    [answers] = printed(parent)
    assert answers == [f"{i}{each.text[3:5]}" for i, each in enumerate(done.sequences)]
    assert parent.text == f"Hi {answers[0][1:]} 4"
    assert parent.n_suspended >= 1
    assert all(each.text in ("Hi a1", "Hi b2") for each in children)


def test_a_fork_may_wait_at_once(controllers: Controllers) -> None:
    done = run_js(
        controllers,
        "const i = await fork(2)\nif (i) { await waitVars('go'); await $`b` } else { await $`a`; setVar('go', 1) }",
    )
    assert [each.text for each in done.sequences] == ["a", "b"]
    assert not any(each.error for each in done.sequences)


def test_a_fork_may_wait_after_text(controllers: Controllers) -> None:
    done = run_js(
        controllers,
        "const i = await fork(2)\nif (i) { await $`b`; await waitVars('go'); await $`c` } else { await $`a`; setVar('go', 1) }",
    )
    assert [each.text for each in done.sequences] == ["a", "bc"]
    assert not any(each.error for each in done.sequences)


def test_a_fork_may_fork_at_once(controllers: Controllers) -> None:
    done = run_js(controllers, "await $`x`\nconst i = await fork(2), j = await fork(2)\nawait $`${i}${j}`")
    assert sorted(each.text for each in done.sequences) == ["x00", "x01", "x10", "x11"]


BACKTRACKS = [
    "const text = await gen({ maxTokens: 7 })\nbacktrack(here)",
    "await $`some text`\nbacktrack(here)",
    "backtrack(here)",
    "await gen({ maxTokens: 3 })\nbacktrack(here)\nawait gen({ maxTokens: 3 })\nbacktrack(here)",
]


@pytest.mark.parametrize("detour", BACKTRACKS)
@pytest.mark.parametrize(
    "way", ["await $`def`", "print(await gen({ choice: ['yes!', 'no!'] }))", "await fork(2)\nawait $`d`", "stop()"]
)
def test_backtrack_equals_never_having_generated(controllers: Controllers, detour: str, way: str) -> None:
    with_detour = run_js(controllers, f"await $`abc`\nconst here = label()\n{detour}\n{way}")
    without = run_js(controllers, f"await $`abc`\n{way}")
    assert [each.error for each in with_detour.sequences] == [""] * len(without.sequences)
    assert [each.text for each in with_detour.sequences] == [each.text for each in without.sequences]
    assert [each.logs for each in with_detour.sequences] == [each.logs for each in without.sequences]


def test_a_label_behind_the_end_is_refused(controllers: Controllers) -> None:
    error = error_of(
        controllers,
        "start(async () => {\nconst a = label()\nawait $`abc`\nconst b = label()\nbacktrack(a)\nbacktrack(b)\n})",
    )
    assert "while the text still reaches" in error
    assert "line 6" in error


@pytest.mark.parametrize("seed", range(5))
def test_schema_output_parses(controllers: Controllers, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "kind": {"enum": ["a", "b"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["ok", "kind", "n"],
        "additionalProperties": False,
    }
    sequence = run_js(
        controllers,
        f"print(JSON.parse(await gen({{ schema: {json.dumps(schema)}, maxTokens: 200 }})))\nawait $`.`",
        anything(seed),
    ).only
    [value] = printed(sequence)
    assert set(value) == {"ok", "kind", "n"}
    assert value["kind"] in ("a", "b")
    assert json.loads(sequence.text[:-1]) == value


@pytest.mark.parametrize(
    "call", ["select(['red', 'green'])", "gen({ choice: ['red', 'green'] })", "gen({ options: ['red', 'green'] })"]
)
def test_choice(controllers: Controllers, call: str) -> None:
    sequence = run_js(controllers, f"print([await {call}])", saying("gr")).only
    assert sequence.text == "green"
    assert printed(sequence) == [["green"]]
    assert sequence.n_steps < len("green"), "what is certain is not sampled"


def test_gen_ends_at_the_end_token_which_leaves_nothing_behind(controllers: Controllers) -> None:
    sequence = run_js(controllers, "print([await gen()])\nprint(getTokens())\nawait $`!`", saying("abc")).only
    assert printed(sequence) == [["abc"], [BOS, *tokenize(b"abc")]]
    assert sequence.tokens == [BOS, *tokenize(b"abc"), *tokenize(b"!")]


def test_gen_with_max_tokens_stop_at_and_store_var(controllers: Controllers) -> None:
    done = run_js(
        controllers,
        "print([await gen({ maxTokens: 2 }), await gen({ stopAt: 'é!', storeVar: 'x' }), getVar('x')])",
        saying("12aaé!bc"),
    )
    [texts] = printed(done.only)
    assert texts == ["12", "aaé!", "aaé!"]
    value = done.variables.read("x")
    assert value is not None
    assert (value.version, value.value) == (1, "aaé!".encode())


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"/\w+;/", "a_9;"),
        (r"/[\d.]+;/", "1.2;"),
        (r"/a\/b;/", "a/b;"),
        (r"/[[&]x;/", "&x;"),
        (r"/[^\d]\D\W;/", "abé;"),
        ("/yes/i", "YeS"),
        ("'[a-c]+;'", "abc;"),
    ],
)
def test_regular_expressions_of_javascript(controllers: Controllers, regex: str, text: str) -> None:
    assert run_js(controllers, f"await gen({{ regex: {regex} }})", saying(text)).only.text == text


def test_more_texts_than_the_runtime_allows_in_a_step(controllers: Controllers) -> None:
    assert run_js(controllers, "for (let i = 0; i < 30; i++) await $`${i},`").only.text == "".join(
        f"{i}," for i in range(30)
    )


def test_variables_tokens_and_prompt(controllers: Controllers) -> None:
    program = """
        print([getVar("a")]); setVar("a", "1é"); appendVar("a", 2); print([getVar("a")])
        print(tokenize("abc"), [detokenize(tokenize("É!"))].join(), getPrompt())
        console.log("x", { y: [1] }, null, undefined, /r/, 1.5)
        """
    lines = run_js(controllers, program).only.logs.splitlines()
    assert lines == [
        "[null]",
        '["1é2"]',
        f"{json.dumps(tokenize(b'abc'))} É! [{BOS}]",
        'x {"y":[1]} null undefined /r/ 1.5',
    ]


def test_token_ids_as_text(controllers: Controllers) -> None:
    program = "await $([BOS, ...tokenize('ab')])\nawait $`c`\nprint(getTokens())".replace("BOS", str(BOS))
    assert printed(run_js(controllers, program).only) == [[BOS, BOS, *tokenize(b"ab"), *tokenize(b"c")]]


def test_gen_ends_at_a_stop_token_which_leaves_nothing_behind(controllers: Controllers) -> None:
    [stop] = tokenize(b"!")
    program = f"print([await gen({{ stopTokens: [{stop}] }})])\nawait $`.`"
    sequence = run_js(controllers, program, saying("abc!def")).only
    assert printed(sequence) == [["abc"]]
    assert sequence.text == "abc."


def test_stop_ends_the_program(controllers: Controllers) -> None:
    assert run_js(controllers, "await $`a`\nstop()\nawait $`b`").only.text == "a"


# The language, and modules


def test_an_async_function_has_functions_inside(controllers: Controllers) -> None:
    program = "function text(n) { return `${n}!` }\nawait $`a`\nawait $`${text(1)}`"
    assert run_js(controllers, program).only.text == "a1!"


def test_the_language_is_that_of_2023(controllers: Controllers) -> None:
    program = """
        class Counter {
          static #made = 0
          static { Counter.#made = 1 }
          static get made() { return Counter.#made }
          static has(object) { return #own in object }
          #own = 1
        }
        print([3, 1, 2].toSorted(), [1, 2].at(-1), [1, 2, 3].findLast((n) => n < 3), [1, 2].with(0, 9))
        print(Object.groupBy([1, 2, 3], (n) => (n % 2 ? "odd" : "even")), Counter.made, Counter.has(new Counter()))
        print("aXbX".replaceAll("X", ""), Object.hasOwn({ a: 1 }, "a"))
        """
    assert run_js(controllers, program).only.logs.splitlines() == [
        "[1,2,3] 2 2 [9,2]",
        '{"odd":[1,3],"even":[2]} 1 true',
        "ab true",
    ]


def test_a_program_may_import_what_is_also_global(controllers: Controllers) -> None:
    program = """
        import { Label, checkVars, gen, getVar, setVar, start as begin } from "aici"
        import * as aici from "aici"
        begin(async () => {
          setVar("a", await gen({ choice: ["x"] }))
          await aici.$`${getVar("a")}`
          checkVars({ a: "x" })
          print(Object.keys(aici).filter((name) => aici[name] !== globalThis[name]), aici.gen === gen, typeof Label)
        })
        """
    sequence = run(controllers, "jsctrl", program).only
    assert (sequence.text, sequence.logs) == ("xx", "[] true function\n")


def test_the_example_of_the_page_with_import(controllers: Controllers) -> None:
    page = (ROOT / "docs" / "AICI-CONTROLLERS.md").read_text()
    [program] = [block for block in page.split("```")[1::2] if block.startswith("js\nimport { Label")]
    text = run(controllers, "jsctrl", program.removeprefix("js\n"), saying("Paris")).only.text
    assert text == "The capital of France is probably Paris."


LIBRARY = {
    "main.js": "import { twice } from './lib/text.js'\nimport { start, $ } from 'aici'\nstart(async () => { await $`${twice('ab')}` })",
    "lib/text.js": "import { n } from '../numbers'\nexport const twice = (text) => text.repeat(n)",
    "numbers.js": "import './main.js'\nexport const n = 2",
}


def test_a_program_of_several_files(controllers: Controllers) -> None:
    assert run(controllers, "jsctrl", json.dumps(LIBRARY)).only.text == "abab"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("numbers.js", "\nexport const = 2", ["SyntaxError", "numbers.js, line 2"]),
        ("lib/text.js", "export const twice = 0\nthrow new Error('oh')", ["Error: oh", "lib/text.js, line 2"]),
        ("lib/text.js", "", ["SyntaxError", "twice", "lib/text.js"]),
        ("lib/text.js", "\nimport '../no.js'", ["no file no.js is given", "./numbers.js", "lib/text.js, line 2"]),
        ("lib/text.js", "import '../../no.js'", ["no file ../no.js is given"]),
        ("lib/text.js", "import 'numbers.js'", ['there is no module "numbers.js"']),
        ("main.js", 5, ["controller_arg is the text of a program, or a text for each file"]),
    ],
)
def test_errors_in_several_files_name_the_file(
    controllers: Controllers, file: str, text: object, words: list[str]
) -> None:
    error = error_of(controllers, json.dumps({**LIBRARY, file: text}))
    for word in words:
        assert word in error
    assert "<jsctrl>" not in error


def test_a_module_may_await_before_it_starts(controllers: Controllers) -> None:
    assert run(controllers, "jsctrl", "const a = await Promise.resolve('b')\nstart(() => $`${a}`)").only.text == "b"


def test_labels(controllers: Controllers) -> None:
    program = """
        await $`ab`
        const l = new Label()
        await $`cd`
        print(l.textSince(), l.tokensSince().length)
        await l.fixedAfter("é")
        print(l.textSince(), getTokens().length - l.tokensSince().length === l.ptr)
        """
    sequence = run_js(controllers, program).only
    assert (sequence.text, sequence.logs.splitlines()) == ("abé", ["cd 2", "é true"])


def test_programs_of_aici_that_know_bytes(controllers: Controllers) -> None:
    program = """
        setVar("a", "é".toBuffer())
        print(getVar("a").decode(), "é".toBuffer().decode(), String.fromBuffer("é".toBuffer()))
        print(tokenize("é".toBuffer()).join() === tokenize("é").join(), detokenize(tokenize("é")).decode())
        print(detokenize(await genTokens({ choice: ["yes"] })), eosToken())
        await fixed("!")
        await gen({ maxTokens: 1 })
        assert(false, "so it is")
        """
    [sequence] = run_js(controllers, program).sequences
    assert sequence.logs.splitlines() == ["é é é", "true é", f"yes {EOS}"]
    assert "AssertionError: so it is" in sequence.error


def test_a_test_says_whether_it_passed(controllers: Controllers) -> None:
    program = "import { test, checkVar } from 'aici'\ntest(async () => {\n  setVar('a', 'b')\n  checkVar('a', '%s')\n})"
    assert run(controllers, "jsctrl", program % "b").only.logs == "TEST OK\n"
    error = error_of(controllers, program % "c")
    assert 'the variable a is "b", not "c"' in error
    assert "line 4" in error


# Errors


@pytest.mark.parametrize(
    ("program", "words"),
    sampled(
        [
            ("start(async () => {\n  let x = ;\n})", ["SyntaxError", "line 2"]),
            (
                "start(async () => {\n  await $`a`\n  nothing()\n})",
                ["ReferenceError", "nothing is not defined", "line 3"],
            ),
            ("\nwhile (true);", ["endless loop"]),
            ("start(async () => {\n  await $`a`\n  for (let i = 0; ; i++) getVar(i)\n})", ["endless loop", "line 3"]),
            ("start(async () => {\n  try { while (true); } catch { while (true); }\n})", ["endless loop"]),
            ("start(async () => {\n  await new Promise(() => {})\n})", ["deadlock", "a promise that nothing resolves"]),
            (
                "start(async () => {\n  await $`a`\n  gen()\n})",
                ["the program ended before gen had finished", "put await before gen"],
            ),
            ("start(async () => {\n  await Promise.all([gen(), gen()])\n})", ["put await before gen", "line 2"]),
            (
                "async function bad() { throw new Error('oh') }\nstart(async () => {\n  bad()\n  await $`a`\n})",
                ["Error: oh", "line 1"],
            ),
            ("start(async () => {\n  await gen({ regex: '(' })\n})", ["regex", "line 2"]),
            (
                "start(async () => {\n  await gen(/\\d/)\n})",
                ["TypeError: gen takes an object: gen({ regex: /\\d/ })", "line 2"],
            ),
            ("start(async () => {\n  await gen('x')\n})", ["TypeError: gen takes an object: gen({ regex: /\\d/ })"]),
            ("start(async () => {\n  await gen(null)\n})", ["TypeError: gen takes an object"]),
            ("start(async () => {\n  await gen({ regexp: /a/ })\n})", ["gen has no option regexp", "line 2"]),
            ("start(async () => {\n  await gen({ regex: /a/, choice: ['b'] })\n})", ["one of regex and choice"]),
            ("start(async () => { throw 'text' })", ["the program threw text"]),
            ("await $`a`", ["only inside the function that is given to start()", "line 1"]),
            ("function f() {\n  await $`a`\n}", ["SyntaxError", "await works only in an async function", "line 2"]),
            (
                "start(async () => {\n  function f(n) { return f(n + 1) + 1 }\n  f(0)\n})",
                ["RangeError", "at f (line 2"],
            ),
            ("start(async () => {\n  JSON.parse('['.repeat(1e5))\n})", ["calls are nested too deeply"]),
            ("start(async () => {\n  const all = []\n  for (;;) all.push({ a: [{}] })\n})", ["out of memory"]),
            ("start(async () => {\n  await $`a\n})", ["SyntaxError: unexpected end of string"]),
            ("\nimport { a } from 'b'", ['there is no module "b"; a program can import aici', "line 2"]),
            ("const a = await import('b')", ['there is no module "b"', "line 1"]),
            ("start(async () => {\n  await import('./b.js')\n})", ["no file b.js is given with the program", "line 2"]),
            ("import { generate } from 'aici'", ["SyntaxError", "generate", "aici"]),
            ("export const a = 3", ["the program does not call start(main)"]),
            ("require('b')", ["require is not defined", "import { gen }", "line 1"]),
            ("start(async () => { setTimeout(f, 1) })", ["setTimeout is not defined: there is no clock"]),
            ("start(async () => { await fetch('a') })", ["fetch is not defined: there is no network"]),
            ("gen()", ["only inside the function that is given to start()"]),
            ("", ["no program was given"]),
            ("null", ["no program was given"]),
            ("// nothing", ["the program does not call start(main)"]),
            ("start(async () => {\n  await gen({ choice: 'yes' })\n})", ["choice is a list of texts", "line 2"]),
            ("start(async () => {\n  await $(['a'])\n})", ["$ takes a text, or a list of token ids", "line 2"]),
            ("start(async () => {\n  await gen({ stopTokens: 3 })\n})", ["stopTokens is a list of token ids"]),
            ("start(async () => {\n  await select([])\n})", ["choice is a list of texts, at least one"]),
            ("start(async () => {\n  await gen({ options: null })\n})", ["options is a list of texts"]),
            ("start(5)", ["start takes a function"]),
            (
                "start(async () => {\n  const all = []\n  for (;;) all.push(new Uint8Array(1e6))\n})",
                ["out of memory", "line 3"],
            ),
        ],
        6,
    ),
)
def test_errors_of_programs_are_clear(controllers: Controllers, program: str, words: list[str]) -> None:
    error = error_of(controllers, program)
    for word in words:
        assert word in error
    assert "program.js" not in error, "the file may have any name"
    assert "wasm function" not in error
    assert "<jsctrl>" not in error, "lines of the SDK mean nothing to its user"
