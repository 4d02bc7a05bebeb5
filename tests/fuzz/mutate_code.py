"""Mutates the project's own code, and asks whether the tests notice.

    pytest -n 0 -p pytest_cov --cov --cov-context=test --cov-report= tests/{loop,property,pure}    writes .coverage; needs pytest-cov
    python -m tests.fuzz.mutate_code                                                        500 mutants, seed 0
    python -m tests.fuzz.mutate_code uma_trio/daemon/kv --count 50 --workers 2 --out found.json

A mutant is one small change inside a function: another comparison, operator or constant, ``and`` for ``or``, a ``return
None``, a call or an assignment to an attribute left out. The tests that execute its line run in a copy of the checkout, up
to ``MAX_TESTS`` of them, spread evenly, until one fails. Every mutant has one of these outcomes:

    killed       a test failed
    survived     no test did
    hung         the tests took longer than ``LIMIT_S``
    not covered  no test executes the line

Survivors are printed as ``path:line``. Many of them change nothing that a user could see, such as the size of a margin.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parents[2]
PLACES: Final = ("uma_trio/daemon/policy", "uma_trio/daemon/kv", "uma_trio/daemon/serving")
MAX_TESTS: Final = 120
TEST_LIMIT_S: Final = 40
LIMIT_S: Final = 120.0

COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
OPERATORS: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}  # fmt: skip
LOGGED: Final = ("debug", "info", "warning", "error")
"""Methods whose calls are left alone: what a log says is not tested."""


@attrs.frozen(kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    end_line: int
    start: int
    """Bytes ``start`` to ``end`` of the file become ``text``."""
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file that still compiles."""
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    tree, found = ast.parse(source), []
    for node in _nodes_in_functions(tree):
        for (start, end), text in _changes(node, span, source):
            mutant = Mutant(
                path=path, line=node.lineno, end_line=node.end_lineno, start=start, end=end, text=text
            )  # fmt: skip
            try:
                compile(mutant.applied(source), path, "exec")
            except SyntaxError:
                continue
            found.append(mutant)
    return found


def _nodes_in_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes in bodies of functions, without annotations, assertions, messages of errors and logs."""
    inside: dict[int, ast.AST] = {}
    skipped: set[int] = set()
    for node in ast.walk(tree):
        left_out: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for statement in node.body:
                    inside.update((id(each), each) for each in ast.walk(statement))
                left_out = [node.returns, node.args, *node.decorator_list]
            case ast.AnnAssign():
                left_out = [node.annotation]
            case ast.Raise() | ast.JoinedStr() | ast.Assert():
                left_out = [node]
            case ast.Call(func=ast.Attribute(attr=name)) if name in LOGGED:
                left_out = [node]
        skipped.update(id(each) for part in left_out if part is not None for each in ast.walk(part))
    yield from (node for at, node in inside.items() if at not in skipped)


def _changes(
    node: ast.AST, span: Callable[[ast.AST], tuple[int, int]], source: bytes
) -> Iterator[tuple[tuple[int, int], str]]:
    """What may be changed about a node: the bytes, and what they become."""

    def between(left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[tuple[tuple[int, int], str]]:
        start, end = span(left)[1], span(right)[0]
        gap = source[start:end]
        if gap.count(old.encode()) == 1:
            at = start + gap.index(old.encode())
            yield (at, at + len(old)), new

    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield from between(node.left, node.comparators[0], *COMPARISONS[type(op)])
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield from between(node.left, node.right, *OPERATORS[type(operator)])
        case ast.BoolOp(op=ast.And()):
            yield from between(node.values[0], node.values[1], "and", "or")
        case ast.BoolOp():
            yield from between(node.values[0], node.values[1], "or", "and")
        case ast.UnaryOp(op=ast.Not()):
            yield (span(node)[0], span(node.operand)[0]), ""
        case ast.Constant(value=bool() as value):
            yield span(node), repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield span(node), repr(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield span(value), "None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute()]):
            yield span(node), "pass"
        case ast.AugAssign(target=ast.Attribute()):
            yield span(node), "pass"


def sample(places: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants of the Python files in ``places``, or all if there are fewer."""
    paths = sorted(path for place in places for path in (ROOT / place).rglob("*.py"))
    found = [mutant for path in paths for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())]
    return random.Random(seed).sample(found, min(count, len(found)))


def covering(mutant: Mutant, by_line: dict[int, list[str]]) -> list[str]:
    """Up to ``MAX_TESTS`` tests that execute the mutant's lines, evenly spread."""
    lines = range(mutant.line, mutant.end_line + 1)
    found = sorted({name.split("|")[0] for line in lines for name in by_line.get(line, ()) if name})
    step = max(1.0, len(found) / MAX_TESTS)
    return [found[int(at * step)] for at in range(min(len(found), MAX_TESTS))]


def outcome(mutant: Mutant, tests: Sequence[str], tree: Path) -> str:
    """Run ``tests`` with the mutant in ``tree``, which is as before afterwards."""
    if not tests:
        return "not covered"
    path = tree / mutant.path
    before = path.read_bytes()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TEST_LIMIT_S), *tests]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_bytes(mutant.applied(before))
    try:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )  # fmt: skip
        try:
            return "survived" if process.wait(LIMIT_S) == 0 else "killed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "hung"
    finally:
        path.write_bytes(before)


def main() -> None:
    from coverage import CoverageData  # of pytest-cov, which the suite does not need

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", default=list(PLACES), help="folders of the checkout")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--out", type=Path, help="write all mutants with their outcomes as JSON")
    options = parser.parse_args()
    covered = CoverageData(str(options.coverage))
    covered.read()
    mutants = sample(options.places, options.count, options.seed)
    by_line = {path: covered.contexts_by_lineno(str(ROOT / path)) for path in {each.path for each in mutants}}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for n in range(options.workers):
            shutil.copytree(
                ROOT, Path(place, str(n)), symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", "lib")
            )
            trees.put(Path(place, str(n)))

        def tried(mutant: Mutant) -> str:
            tree = trees.get()
            try:
                return outcome(mutant, covering(mutant, by_line[mutant.path]), tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(options.workers) as pool:
            outcomes = list(pool.map(tried, mutants))
    for mutant, found in zip(mutants, outcomes, strict=True):
        if found == "survived":
            print(f"survived  {mutant.path}:{mutant.line}  {mutant.text or '(not left out)'}")
    print(", ".join(f"{found} {n}" for found, n in Counter(outcomes).most_common()), "of", len(mutants))
    if options.out is not None:
        rows = [{**attrs.asdict(mutant), "outcome": found} for mutant, found in zip(mutants, outcomes, strict=True)]
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
