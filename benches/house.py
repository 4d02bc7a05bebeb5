"""The size of the house: lines by folder and by kind, words and pages of documentation; of the checkout it is run in."""

from __future__ import annotations

import ast
import collections
import pathlib
import subprocess

KINDS = "code", "docstrings", "comments", "blank"


def kinds(text: str) -> collections.Counter[str]:
    """How many lines of a module are code, docstrings (strings that are statements), comments, or blank."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines_by_kind = collections.Counter[str]()
    for number, line in enumerate((text_line.strip() for text_line in text.splitlines()), 1):
        comment = "comments" if line.startswith("#") else "code"
        lines_by_kind["docstrings" if number in strings else comment if line else "blank"] += 1
    return lines_by_kind


if __name__ == "__main__":
    folders: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    for name in (name for name in names if name.endswith(".py")):
        parts = name.split("/")[:-1]
        folders["/".join(parts[:2] if parts[:1] in (["uma_trio"], ["tests"]) else parts[:1])] += kinds(
            pathlib.Path(name).read_text()
        )
    print(f"{'':28}", *(f"{kind:>10}" for kind in KINDS))
    for folder, counts in sorted(folders.items()):
        print(f"{folder:28}", *(f"{counts[kind]:>10,}" for kind in KINDS))
    pages = [pathlib.Path(name) for name in names if name.endswith(".md")]
    print(f"{sum(len(page.read_text().split()) for page in pages):,} words of documentation on {len(pages)} pages")
