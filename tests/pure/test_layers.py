"""Who may import whom: one way only, down the list of rooms in docs/ARCHITECTURE.md."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import uma_trio

ROOT = Path(uma_trio.__file__).parent.parent

ROOMS = (
    "errors",
    "config",
    "protocol",
    "scheduling",
    "sampling",
    "kv",
    "telemetry",
    "store",
    "engine",
    "models",
    "runner",
    "sessions",
    "daemon",
    "client",
    "demo",
    "cli",
    "training",
    "__main__",
)
"""Each may import those before it.  A new room gets its place here and in docs/ARCHITECTURE.md."""

PURE = ROOMS[: ROOMS.index("store")]

STANDARD_AND_PURE = frozenset(
    {
        *("__future__", "bisect", "codecs", "collections", "difflib", "enum", "functools", "heapq", "io"),
        *("itertools", "json", "math", "operator", "re", "struct", "textwrap", "types", "typing"),
    }
)
PURE_MAY_IMPORT = STANDARD_AND_PURE | {"attrs", "cbor2", "msgspec", "numpy"}
"""What has no clock, no socket, no file and no task."""

EXCEPTIONS = {"config": {"pathlib", "yaml"}}
"""Paths are values of the configuration, and it reads its own file."""

NO_NUMPY = ("errors", "config", "protocol", "scheduling")
"""What a client or a flag needs must not cost a tenth of a second."""


class Import:
    """One imported module and where."""

    def __init__(self, file: Path, line: int, module: str) -> None:
        self.file, self.line, self.module = file, line, module

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def room(self) -> str | None:
        """The room of ours that is imported; None for others' modules."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "uma_trio" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(file: Path, source: str | None = None) -> list[Import]:
    """All imports of a file, also those inside functions and under TYPE_CHECKING."""
    found = []
    for node in ast.walk(ast.parse(source if source is not None else file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = file.relative_to(ROOT).parent.parts
                module = ".".join([*package[: len(package) - node.level + 1], *([module] if module else [])])
            if module == "uma_trio" or (node.level and not node.module):  # from uma_trio import config
                found += [Import(file, node.lineno, f"{module}.{alias.name}") for alias in node.names]
            else:
                found.append(Import(file, node.lineno, module))
    return found


def room_of(file: Path) -> str:
    part = file.relative_to(ROOT / "uma_trio").parts[0]
    return part.removesuffix(".py")


FILES = sorted(file for file in (ROOT / "uma_trio").rglob("*.py") if "__pycache__" not in file.parts)
ABI_FILES = sorted((ROOT / "llama_abi").rglob("*.py"))
ALL_IMPORTS = [found for file in FILES for found in imports_of(file)]


def complain(wrong: list[Import], rule: str) -> None:
    assert not wrong, rule + "\n" + "\n".join(f"  {found}" for found in wrong)


def test_every_room_has_its_place() -> None:
    rooms = {room_of(file) for file in FILES} - {"__init__"}
    assert rooms <= set(ROOMS), f"rooms without a place in ROOMS: {sorted(rooms - set(ROOMS))}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1]}
    wrong = [
        found
        for found in ALL_IMPORTS
        if room_of(found.file) == room and found.room is not None and found.room not in allowed
    ]
    complain(wrong, f"{room} stands before these in ROOMS, so it may not import them:")


def test_the_modules_of_kv_import_each_other_one_way_in_the_documented_order() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    listed = text.split("## What is computed once")[1].split("```")[1]
    named = re.findall(r"^([a-z]+)  ", listed, re.MULTILINE)
    uses: dict[str, set[str]] = {
        file.stem: {found.module.removeprefix("uma_trio.kv.") for found in imports_of(file) if found.room == "kv"}
        for file in FILES
        if room_of(file) == "kv"
    }
    assert uses["cache"] >= {"entry", "pool", "rewinding", "saving", "sharing"}
    graphlib.TopologicalSorter(uses).prepare()  # raises CycleError, which names them
    for n, name in enumerate(named):
        assert not uses[name] & set(named[n + 1 :]), name


def test_the_order_is_the_one_that_is_documented() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    rooms = text.split("```")[1].split("uma_trio/\n")[1]
    named = re.findall(r"^  ([a-z_]+)(?:\.py|/)\s", rooms, re.MULTILINE)
    assert (*named, "__main__") == ROOMS


def test_the_modules_of_the_runner_import_one_way() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    listed = text.split("The room with most in it")[1].split("```")[1]
    order = re.findall(r"^(\w+)\.py  ", listed, re.MULTILINE)
    files = {file.stem: file for file in FILES if room_of(file) == "runner" and file.stem != "__init__"}
    assert sorted(order) == sorted(files)
    for n, name in enumerate(order):
        own = [found for found in imports_of(files[name]) if found.module.startswith("uma_trio.runner")]
        wrong = [found for found in own if found.module.removeprefix("uma_trio.runner.") not in order[:n]]
        complain(wrong, f"{name} stands before these in docs/ARCHITECTURE.md, so it may not import them:")


def test_nothing_imports_the_training_scripts_which_the_wheel_leaves_out() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "uma_trio/training" in wheel["exclude"]
    wrong = [found for found in ALL_IMPORTS if found.room == "training" and room_of(found.file) != "training"]
    complain(wrong, "training is not in the wheel:")


def test_the_package_itself_imports_nothing() -> None:
    assert imports_of(ROOT / "uma_trio" / "__init__.py") == []


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_import_nothing_that_acts(room: str) -> None:
    allowed = PURE_MAY_IMPORT | EXCEPTIONS.get(room, set()) | {"uma_trio"}
    wrong = [found for found in ALL_IMPORTS if room_of(found.file) == room and found.top not in allowed]
    complain(wrong, f"{room} is pure: no tasks, no clock, no sockets, no files, no C:")


@pytest.mark.parametrize("room", NO_NUMPY)
def test_rooms_that_a_client_needs_are_light(room: str) -> None:
    complain(
        [found for found in ALL_IMPORTS if room_of(found.file) == room and found.top == "numpy"],
        f"{room} is imported by every command; numpy would slow all of them down:",
    )


def test_only_the_engine_imports_llama_abi() -> None:
    complain(
        [found for found in ALL_IMPORTS if found.top == "llama_abi" and room_of(found.file) != "engine"],
        "llama_abi is the engine's alone:",
    )


def test_nobody_above_llama_abi_touches_ctypes() -> None:
    complain([found for found in ALL_IMPORTS if found.top in ("ctypes", "cffi")], "C is llama_abi's alone:")


def test_llama_abi_knows_nothing_of_us() -> None:
    found = [found for file in ABI_FILES for found in imports_of(file)]
    complain([each for each in found if each.top in ("uma_trio", "trio")], "llama_abi is C and nothing else:")


def test_click_stays_in_the_command_line() -> None:
    wrong = [found for found in ALL_IMPORTS if found.top == "click" and room_of(found.file) not in ("cli",)]
    complain(wrong, "click is cli's alone:")


def test_nothing_is_imported_by_star() -> None:
    for file in (*FILES, *ABI_FILES):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), f"{file}:{node.lineno}"


def test_no_other_event_loop() -> None:
    complain([found for found in ALL_IMPORTS if found.top in ("asyncio", "anyio")], "tasks are trio's:")


def test_the_reader_sees_every_kind_of_import() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from uma_trio import kv\n    from . import x\n    from ..e import y\n"
    found = imports_of(ROOT / "uma_trio" / "cli" / "ask.py", source)
    assert [each.module for each in found] == ["a.b", "c", "uma_trio.kv", "uma_trio.cli.x", "uma_trio.e"]
    assert [each.room for each in found] == [None, None, "kv", "cli", "e"]


@pytest.mark.parametrize(
    "statement", ["import uma_trio.cli", "import uma_trio.cli.serve, uma_trio.cli.ask, uma_trio.cli.metrics"]
)
def test_the_command_line_starts_without_the_heavy_modules(statement: str) -> None:
    """``--help``, a wrong flag and shell completion answer at once."""
    heavy = ["trio", "numpy", "llama_abi", "yaml", "jinja2", "structlog", "rich", "msgspec"]
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}} & set({heavy})))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == []
