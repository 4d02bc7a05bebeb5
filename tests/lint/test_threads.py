"""What threads must not do."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "uma_trio"
IN_THREADS = ("aici/runtime", "daemon/store", "gateway/batches", "hub")
"""Folders of modules whose functions run in threads."""


def test_threads_meet_no_class_for_the_first_time() -> None:
    """msgspec 0.22 ends the process with SIGSEGV if two threads do: it publishes what it knows of a class before all of it
    is there.  So decoders are made when a module is imported."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for folder in IN_THREADS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).startswith("msgspec.")
        and (node.func.attr in ("Decoder", "convert") or any(each.arg == "type" for each in node.keywords))
        and "dict[" not in ast.unparse(node)
    ]
    assert not wrong
